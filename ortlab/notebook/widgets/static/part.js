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

// anywidget gives up a model that is not there after 2 s, as on a busy machine: its view is drawn with what it was made with,
// and anywidget hands it no later message. Then ipywidgets itself is given them, and the kernel is asked for what was missed.
async function listen(model) {
  const own = await model.widget_manager.get_model(model.get("own"));
  try {
    // A message of no kind, with which nothing is done.
    await own._handle_comm_msg({ content: { data: {} } });
  } catch {
    own._handle_comm_msg = Object.getPrototypeOf(own.constructor.prototype)._handle_comm_msg.bind(own);
    own.comm?.on_msg(own._handle_comm_msg);
    own.comm?.send({ method: "request_state" });
  }
}

// `held` is of the widget, and outlives a view of it.
export async function render(context, script, held) {
  await listen(context.model);
  const name = context.model.get("runs");
  const { render: draw, css } = await ((script.ran ??= {})[name] ??= begin(script, name));
  if (css) context.el.append(Object.assign(document.createElement("style"), { textContent: css }));
  return draw(context, { held, unpack, script });
}
