// Shows a drawing and saves it as a file, as it looks in the present theme. The drawing comes from ortlab/render.

const NAMESPACE = "http://www.w3.org/2000/svg";
const SCALE = 2; // pixels of the saved PNG per pixel on the screen

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function background(node) {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (colour && colour !== "rgba(0, 0, 0, 0)" && colour !== "transparent") return colour;
  }
  return "white";
}

// Outside the page there is nothing that it could take its ink and its paper from.
function alone(svg) {
  const copy = svg.cloneNode(true);
  copy.setAttribute("xmlns", NAMESPACE);
  copy.setAttribute("color", getComputedStyle(svg).color);
  const box = svg.viewBox.baseVal;
  const paper = document.createElementNS(NAMESPACE, "rect");
  for (const side of ["x", "y", "width", "height"]) paper.setAttribute(side, box[side]);
  paper.setAttribute("fill", background(svg));
  copy.prepend(paper);
  return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
}

async function savePng(svg, name) {
  const image = new Image();
  const url = URL.createObjectURL(alone(svg));
  try {
    image.src = url;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = SCALE * svg.viewBox.baseVal.width;
    canvas.height = SCALE * svg.viewBox.baseVal.height;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(blob, `${name}.png`), "image/png");
  } finally {
    URL.revokeObjectURL(url);
  }
}

function button(text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.className = "jupyter-button lm-mod-secondary";
  made.setAttribute("data-lm-suppress-shortcuts", "true");
  made.addEventListener("click", act);
  return made;
}

export function render({ model, el }, { unpack }) {
  const frame = document.createElement("div");
  frame.className = "ortlab-scroll";
  const drawing = () => frame.querySelector("svg");
  const buttons = document.createElement("div");
  buttons.className = "ortlab-row ortlab-save";
  buttons.append(
    button("Save as SVG", () => save(alone(drawing()), `${model.get("file")}.svg`)),
    button("Save as PNG", () => savePng(drawing(), model.get("file"))),
  );
  el.classList.add("ortlab");
  el.append(frame, buttons);
  async function draw() {
    const shown = model.get("svg");
    const svg = await unpack(shown);
    if (shown !== model.get("svg")) return; // a later one has come meanwhile
    frame.innerHTML = svg ?? "";
    el.hidden = drawing() === null;
  }
  model.on("change:svg", draw);
  draw();
  return () => model.off("change:svg", draw);
}
