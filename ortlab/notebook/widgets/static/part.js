// Unpacks the scripts that ortlab/notebook/widgets/browser.py carries once for all parts of a panel, and runs that of a part.

async function unpack(text) {
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function begin(script, name) {
  const { code, css } = await (script.all ??= unpack(script.get("source")));
  const source = URL.createObjectURL(new Blob([code[name]], { type: "text/javascript" }));
  return { css: css[name], ...(await import(source)) };
}

// `held` is of the widget, and outlives a view of it.
export async function render(context, script, held) {
  const name = context.model.get("runs");
  const { render: draw, css } = await ((script.ran ??= {})[name] ??= begin(script, name));
  if (css) context.el.append(Object.assign(document.createElement("style"), { textContent: css }));
  return draw(context, { held, unpack, script });
}
