// Fetches the script of a part of the panel, which ortlab/notebook/widgets/part.py carries once for all parts that run it.

async function unpack(text) {
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const read = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(read).text());
}

async function started(script) {
  const { code, css } = await unpack(script.get("source"));
  const { render } = await import(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
  return { render, css };
}

export default () => {
  const held = {}; // of the widget, for all cells that show it
  return {
    async render(context) {
      const { model } = context;
      // A reference to another widget is "IPY_MODEL_" and its id.
      const script = await model.widget_manager.get_model(model.get("script").slice(10));
      script.ortlab ??= started(script);
      const { render, css } = await script.ortlab;
      if (css) context.el.append(Object.assign(document.createElement("style"), { textContent: css }));
      return render(context, { held, unpack, script });
    },
  };
};
