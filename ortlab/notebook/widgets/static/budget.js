// A slider over predicted shares of step memory. All words, costs and bytes come from ortlab/render/budget_states.py.

// Okabe and Ito's colours, and lighter ones of the same.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
  "#6fb1d8", "#f2cc7a", "#72c7ab", "#e5bcd3", "#a9d6f2", "#eda56f"];
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function size(bytes) {
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit ? bytes.toPrecision(3) : bytes} ${UNITS[unit]}`;
}

function make(name, className, parent, text = "") {
  const node = Object.assign(document.createElement(name), { className, textContent: text });
  parent.append(node);
  return node;
}

export function render({ model, el }, { unpack }) {
  el.classList.add("ortlab", "ortlab-shares");
  let shown = null;
  let parts = null;

  function build() {
    el.replaceChildren();
    el.hidden = !shown;
    if (!shown) return;
    const alone = shown.states.length < 2; // nothing is predicted yet
    const line = make("label", "ortlab-keep", el);
    line.hidden = alone;
    const words = make("span", "", line);
    const slider = Object.assign(make("input", "", line), { type: "range", min: shown.low, max: 100, step: 1 });
    slider.setAttribute("aria-label", "Share of step memory to keep, in percent");
    slider.setAttribute("data-lm-suppress-shortcuts", "true");
    slider.addEventListener("input", () => draw(Number(slider.value)));
    slider.addEventListener("change", () => {
      model.set("keep", Number(slider.value));
      model.save_changes();
    });
    const cost = make("strong", "ortlab-cost", line);
    const said = make("p", "", el);
    said.setAttribute("role", "status");
    const bars = shown.bars.map((bar) => {
      const title = make("p", "ortlab-bar-title", el);
      const frame = make("div", "ortlab-bar", el);
      frame.setAttribute("role", "img");
      const total = bar.all.reduce((sum, one) => sum + one, 0);
      const pieces = bar.names.map((name, at) => {
        const piece = make("span", "", frame);
        piece.style.background = COLOURS[at % COLOURS.length];
        piece.style.color = at % COLOURS.length ? "#000" : "#fff";
        return piece;
      });
      return { bar, title, frame, total, pieces };
    });
    parts = { alone, words, slider, cost, said, bars };
  }

  // The first state that fits costs least: they go from the largest to the smallest, and smaller ones cost more.
  function draw(keep) {
    if (!shown) return;
    const at = shown.states.findIndex((one) => 100 * one.share <= keep + 0.05);
    const state = shown.states[at < 0 ? shown.states.length - 1 : at];
    parts.words.textContent = `Keep ${keep} % of step memory`;
    parts.slider.value = keep;
    parts.slider.setAttribute("aria-valuetext", `${keep} %, predicted cost: ${state.cost}`);
    parts.cost.textContent = `predicted: ${state.cost}`;
    parts.said.textContent = state.said;
    parts.bars.forEach(({ bar, title, frame, total, pieces }, number) => {
      const kept = state.kept?.[number];
      const now = (kept ?? []).reduce((sum, one) => sum + one, 0);
      title.textContent = kept
        ? `${bar.title}: ${parts.alone ? size(now) : `about ${size(now)} of ${size(total)}`}` : `${bar.title}: not known for a memory level`;
      frame.hidden = !kept;
      frame.setAttribute("aria-label", bar.names.map((name, one) => `${name} ${size(kept?.[one] ?? 0)}`).join(", "));
      pieces.forEach((piece, one) => {
        const share = (kept?.[one] ?? 0) / total;
        piece.style.width = `${100 * share}%`;
        piece.title = `${bar.names[one]}: ${size(kept?.[one] ?? 0)} of ${size(bar.all[one])}`;
        piece.textContent = share > 0.06 ? bar.names[one].split(".").slice(-2).join(".") : "";
      });
    });
  }

  async function renew() {
    const packed = model.get("states");
    const states = await unpack(packed);
    if (packed !== model.get("states")) return; // a later one has come meanwhile
    shown = states;
    build();
    draw(model.get("keep"));
  }
  const moved = () => draw(model.get("keep"));
  model.on("change:states", renew);
  model.on("change:keep", moved);
  renew();
  return () => {
    model.off("change:states", renew);
    model.off("change:keep", moved);
  };
}
