// Draws runs by time of a step and step memory. Places, ticks and words come from ortlab/render/result_card.py.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 470;
const HEIGHT = 250;
const FRAME = { left: 80, top: 12, width: 374, height: 182 };
const SIZE = 6; // half the width of a point
const CROWD = 12; // points from which on only the first, the last and the chosen one show number and whisker

// Okabe and Ito's colours; the shape says the same.
const SHAPES = {
  ort: ["#0072b2", "M-6,0a6,6 0 1,0 12,0a6,6 0 1,0 -12,0"],
  eager: ["#e69f00", "M-5.5,-5.5h11v11h-11z"],
  checkpoint: ["#009e73", "M0,-7l6.5,12h-13z"],
  compile: ["#cc79a7", "M0,-7.5l7,7.5l-7,7.5l-7,-7.5z"],
  fallback: ["#d32f2f", "M-6,-4l2,-2l4,4l4,-4l2,2l-4,4l4,4l-2,2l-4,-4l-4,4l-2,-2l4,-4z"],
};

function make(name, attributes, parent, text) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent?.append(node);
  return node;
}

const across = (share) => FRAME.left + share * FRAME.width;
const up = (share) => FRAME.top + (1 - share) * FRAME.height;

function axes(svg, shown) {
  const low = FRAME.top + FRAME.height;
  for (const [share, words] of shown.x.ticks) {
    const x = across(share);
    make("path", { d: `M${x},${FRAME.top}V${low}`, class: "ortlab-grid" }, svg);
    make("text", { x, y: low + 15, "text-anchor": "middle" }, svg, words);
  }
  for (const [share, words] of shown.y.ticks) {
    const y = up(share);
    make("path", { d: `M${FRAME.left},${y}H${FRAME.left + FRAME.width}`, class: "ortlab-grid" }, svg);
    make("text", { x: FRAME.left - 6, y: y + 4, "text-anchor": "end" }, svg, words);
  }
  make("text", { x: FRAME.left + FRAME.width, y: low + 31, "text-anchor": "end", class: "ortlab-axis" }, svg,
    `${shown.x.title} →`);
  make("text", { x: 10, y: FRAME.top, "text-anchor": "end", transform: `rotate(-90 10 ${FRAME.top})`,
    class: "ortlab-axis" }, svg, `${shown.y.title} →`);
  let x = FRAME.left;
  for (const [kind, words] of shown.kinds) {
    const [colour, path] = SHAPES[kind] ?? SHAPES.ort;
    make("path", { d: path, fill: colour, transform: `translate(${x + SIZE},${low + 46})` }, svg);
    const text = make("text", { x: x + 18, y: low + 50 }, svg, words);
    x += 34 + 6.4 * text.textContent.length;
  }
}

export function render({ model, el }, { unpack }) {
  el.classList.add("ortlab", "ortlab-scatter");
  el.setAttribute("data-lm-suppress-shortcuts", "true");
  const tell = (key) => model.send({ choose: key });

  function point(svg, one, chosen, crowded) {
    const [colour, path] = SHAPES[one.kind] ?? SHAPES.ort;
    const [x, y] = [across(one.x), up(one.y)];
    const classes = ["ortlab-point", one.base ? "ortlab-base" : "", one.last ? "ortlab-last" : "", one.key === chosen ? "ortlab-chosen" : ""];
    const spot = make("g", {
      class: classes.filter(Boolean).join(" "), role: "button", tabindex: "0", "data-key": one.key,
      "aria-pressed": String(one.key === chosen), "aria-label": `${one.name}: ${one.said}`,
    }, svg);
    make("title", {}, spot, `${one.name}\n${one.said}`);
    make("path", { d: `M${across(one.low)},${y}H${across(one.high)}m0,-4v8M${across(one.low)},${y - 4}v8`,
      stroke: colour, class: "ortlab-whisker" }, spot);
    make("circle", { cx: x, cy: y, r: crowded ? 8 : 13, class: "ortlab-halo" }, spot);
    make("path", { d: path, fill: colour, transform: `translate(${x},${y})` }, spot);
    make("text", { x: x + 9, y: y - 8, class: "ortlab-number-of" }, spot, `#${one.key}`);
    spot.addEventListener("click", () => tell(one.key));
    spot.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopPropagation();
      tell(one.key);
    });
  }

  async function draw() {
    const packed = model.get("drawing");
    const shown = await unpack(packed);
    if (packed !== model.get("drawing")) return; // a later one has come meanwhile
    const held = el.contains(document.activeElement) ? document.activeElement.getAttribute("data-key") : null;
    el.replaceChildren();
    el.hidden = !shown;
    if (!shown) return;
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group",
      "aria-label": "Runs by time of a step and step memory" }, el);
    axes(svg, shown);
    const crowded = shown.points.length > CROWD;
    svg.classList.toggle("ortlab-crowded", crowded);
    for (const one of shown.points) point(svg, one, shown.chosen, crowded);
    if (shown.left_out) {
      const note = document.createElement("p");
      note.className = "ortlab-quiet";
      note.textContent = shown.left_out;
      el.append(note);
    }
    if (held) el.querySelector(`[data-key="${held}"]`)?.focus({ preventScroll: true });
  }
  model.on("change:drawing", draw);
  draw();
  return () => model.off("change:drawing", draw);
}
