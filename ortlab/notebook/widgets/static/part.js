// Fetches the script of a part of the panel, which ortlab/notebook/widgets/browser.py carries once for all that run it.
// Every part carries this file, so it is short: t is a packed text, s the model of a script, c a context.
const unpack = async (t) => t ? new Response(new Blob([Uint8Array.from(atob(t), (a) => a.charCodeAt(0))])
.stream().pipeThrough(new DecompressionStream("gzip"))).json() : null;
const start = async (s) => { const { code, css } = await unpack(s.get("source"));
return { css, ...await import(URL.createObjectURL(new Blob([code], { type: "text/javascript" }))) }; };
export default () => { const held = {}; return { async render(c) {
// A reference to another widget is "IPY_MODEL_" and its id.
const script = await c.model.widget_manager.get_model(c.model.get("script").slice(10));
const { render, css } = await (script.ortlab ??= start(script));
if (css) c.el.append(Object.assign(document.createElement("style"), { textContent: css }));
return render(c, { held, unpack, script }); } }; };
