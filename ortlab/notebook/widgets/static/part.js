// Fetches the script of a part of the panel, which ortlab/notebook/widgets/browser.py carries once for all that run it.
// Every part carries this file, so it is short: t is a packed text, s the model of a script, n a file's name, c a context.
const unpack = async (t) => t ? new Response(new Blob([Uint8Array.from(atob(t), (a) => a.charCodeAt(0))])
.stream().pipeThrough(new DecompressionStream("gzip"))).json() : null;
const start = async (s, n) => { const { code, css } = await (s.all ??= unpack(s.get("source")));
return { css: css[n], ...await import(URL.createObjectURL(new Blob([code[n]], { type: "text/javascript" }))) }; };
export default () => { const held = {}; return { async render(c) {
// A reference to another widget is "IPY_MODEL_" and its id.
const script = await c.model.widget_manager.get_model(c.model.get("script").slice(10)), n = c.model.get("runs");
const { render, css } = await ((script.ran ??= {})[n] ??= start(script, n));
if (css) c.el.append(Object.assign(document.createElement("style"), { textContent: css }));
return render(c, { held, unpack, script }); } }; };
