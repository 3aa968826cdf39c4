// Draws a graph as rows that open: the forward of each module on the left, its backward on the right, and between them
// bands for what is kept, as wide as their bytes. Rows, words and facts come from ortlab/render/graph_map.py; every text is
// set as text, since names come from models. Opening, searching and colouring ask the kernel nothing.

const NAMESPACE = "http://www.w3.org/2000/svg";
const ROW = 21; // px; the style sheet has the same
const FEW = 12; // rows that are shown at first, where there are so many, even if they do not fit
const THICK = 0.86; // of a row's height: what the row with most bytes takes
const FOUND = 400; // rows that a search opens, at most

const HOW = "Click a row to see its module, line of source, bytes, and what reads what it keeps. ▸ or the key → opens it.";
const TIME = "#d55e00";
const KEPT = "#1b9e77"; // as the bands
const COLOURS = [["operator", "operator"], ["bytes", "bytes kept"], ["time", "time"], ["difference", "what changed"]];

function make(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  if (["select", "button", "input"].includes(tag)) node.setAttribute("data-lm-suppress-shortcuts", "true");
  node.append(...children);
  return node;
}

function draw(name, attributes, parent) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  parent.append(node);
  return node;
}

const sum = (values) => Object.values(values).reduce((total, one) => total + one, 0);

export function render({ model, el }, { unpack, held }) {
  const send = (act, ...values) => model.send({ do: act, with: values });
  const local = (text, title, act) => {
    const made = make("button", { type: "button", textContent: text, title, className: "jupyter-button ortlab-here" });
    made.addEventListener("click", act);
    return made;
  };
  const colour = make("select", { className: "ortlab-here" });
  const part = make("select");
  const partBox = make("label", {}, "Part", part);
  const search = make("input", { type: "search", placeholder: "Search modules and operators", className: "ortlab-here" });
  search.setAttribute("aria-label", "Search modules and operators");
  const first = make("select", { className: "ortlab-here" });
  const second = make("select", { className: "ortlab-here" });
  const compare = make("button", { type: "button", textContent: "What changed", className: "jupyter-button" });
  const plans = make("button", { type: "button", textContent: "Which plans remove it?", className: "jupyter-button" });
  const nodes = make("button", { type: "button", textContent: "Every node", className: "jupyter-button" });
  plans.title = "Ask ONNX Runtime which recompute plans remove each kept value: some tenths of a second a plan";
  nodes.title = "Draw every node with netron; with a row chosen, the nodes around it";
  const said = make("p", { className: "ortlab-said" });
  said.setAttribute("role", "status");
  const legend = make("p", { className: "ortlab-legend" });
  const heads = make("div", { className: "ortlab-mapheads", ariaHidden: "true" });
  const tree = make("div", { className: "ortlab-rows" });
  tree.setAttribute("role", "tree");
  tree.setAttribute("aria-label", "Modules of the graph, with their forward and backward");
  const bands = document.createElementNS(NAMESPACE, "svg");
  bands.setAttribute("aria-hidden", "true");
  const drawn = make("div", { className: "ortlab-mapped" }, tree);
  const facts = make("aside", { className: "ortlab-facts" });
  facts.setAttribute("aria-live", "polite");
  facts.setAttribute("aria-label", "What is known of the chosen row");
  facts.tabIndex = 0;
  const fit = local("Fit", "Close what was opened, so that all of it is seen", () => { open = opening(); paint(); drawn.scrollTop = 0; });
  const root = make("div", { className: "ortlab ortlab-map" },
    make("div", { className: "ortlab-tools" }, partBox, make("label", {}, "Colour by", colour), search, fit,
      make("span", { className: "ortlab-runpair" }, make("label", {}, "From", first), make("label", {}, "to", second), compare)),
    make("div", { className: "ortlab-mapsaid" }, said, nodes), make("div", { className: "ortlab-mapbeside" }, make("div", { className: "ortlab-mapleft" }, heads, drawn, legend), facts));
  el.classList.add("ortlab-mapbox");
  el.append(root);

  let map = null; // what Python told
  let open = new Set();
  let visible = []; // numbers of the rows that are shown
  let chosen = -1;
  let asked = -1; // number of the map that was asked for
  let number = -1; // number of the map that is drawn
  let children = [];

  // ---- which rows are open ------------------------------------------------------------------------------------

  function opening() {
    // What has most nodes first, as long as all rows fit. What is the same in each layer is opened in all or in none.
    const room = Math.max(FEW, Math.floor(drawn.clientHeight / ROW));
    const opened = new Set();
    const size = (at) => sum(map.rows[at].f.k) + sum(map.rows[at].b.k);
    const total = (group) => group.reduce((all, at) => all + size(at), 0);
    const lists = new Map(); // what opens together, by a name
    const offer = (rows) => {
      for (const at of rows) {
        if (!children[at].some((one) => children[one].length)) continue;
        const name = `${map.rows[at].facts[0][1].replace(/(^|\.)\d+(?=\.|$)/g, "$1*")} ${map.rows[at].t === map.own}`;
        lists.set(name, [...(lists.get(name) ?? []), at]);
      }
    };
    const roots = [...map.rows.keys()].filter((at) => map.rows[at].p < 0);
    let count = roots.length;
    offer(roots);
    while (lists.size) {
      const [name, group] = [...lists].reduce((one, other) => (total(other[1]) > total(one[1]) ? other : one));
      lists.delete(name);
      const inner = group.flatMap((at) => children[at]);
      if (count + inner.length > room) continue;
      group.forEach((at) => opened.add(at));
      count += inner.length;
      offer(inner);
    }
    return opened;
  }

  function walk() {
    const wanted = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    if (!wanted.length) {
      const shown = (at) => map.rows[at].p < 0 || (open.has(map.rows[at].p) && shown(map.rows[at].p));
      return { rows: [...map.rows.keys()].filter(shown), found: 0 };
    }
    const kept = new Set();
    let found = 0;
    const text = (row) => `${row.t} ${row.facts[0][1]} ${row.facts[1]?.[1] ?? ""} ${(row.n ?? []).join(" ")}`.toLowerCase();
    map.rows.forEach((row, at) => {
      if (!wanted.every((word) => text(row).includes(word))) return;
      found += 1;
      if (kept.size > FOUND) return;
      for (let one = at; one >= 0; one = map.rows[one].p) kept.add(one);
    });
    return { rows: [...kept].sort((one, other) => one - other), found };
  }

  // ---- drawing ------------------------------------------------------------------------------------------------

  const measure = (side) => ({ operator: sum(side.k), bytes: side.by, time: side.ms, difference: sum(side.m) })[colour.value];

  function bar(side, most) {
    const whole = make("span", { className: "ortlab-mapbar" });
    const value = measure(side);
    whole.style.width = `${most ? Math.max(value ? 1.5 : 0, (100 * value) / most) : 0}%`;
    const mode = colour.value;
    const parts = mode === "operator" ? Object.entries(side.k).map(([kind, count]) => [map.colours[kind], count])
      : mode === "difference" ? Object.entries(side.m).map(([mark, count]) => [map.colours[mark], count])
      : [[mode === "time" ? TIME : KEPT, 1]];
    for (const [shade, count] of parts) {
      const part = make("span");
      part.style.flexGrow = count;
      part.style.background = shade;
      whole.append(part);
    }
    const repeated = { operator: side.r / sum(side.k), time: side.rms / side.ms }[mode];
    if (repeated) {
      const again = make("span", { className: "ortlab-again" });
      again.style.width = `${100 * repeated}%`;
      whole.append(again);
    }
    return whole;
  }

  function cell(side, which, most, isOpen) {
    const made = make("span", { className: `ortlab-mapcell ortlab-${which}` });
    if (isOpen) return made;
    const words = make("span", { className: "ortlab-mapwords", textContent: side.w[colour.value] });
    made.append(words, make("span", { className: "ortlab-mapspan" }, bar(side, most)));
    return made;
  }

  function paint(focus = false) {
    if (!map) return;
    const walked = walk();
    visible = walked.rows;
    const closed = new Set(visible);
    for (const at of visible) if (map.rows[at].p >= 0) closed.delete(map.rows[at].p);
    const most = Math.max(0, ...[...closed].flatMap((at) => [measure(map.rows[at].f), measure(map.rows[at].b)]));
    if (!visible.includes(chosen)) chosen = visible.includes(map.rows[chosen]?.p) ? map.rows[chosen].p : chosen;
    const stop = visible.includes(chosen) ? chosen : visible[0];
    tree.replaceChildren(...visible.map((at) => {
      const row = map.rows[at];
      const inner = children[at].length > 0;
      const isOpen = !closed.has(at);
      const name = make("span", { className: "ortlab-mapname", textContent: row.t, title: row.facts[0][1] });
      name.style.paddingLeft = `${14 * row.d}px`;
      if (inner) name.prepend(make("span", { className: "ortlab-mapfold", textContent: isOpen ? "▾" : "▸", ariaHidden: "true" }));
      const line = make("div", { className: "ortlab-maprow", tabIndex: at === stop ? 0 : -1 },
        name, cell(row.f, "forward", most, isOpen), make("span"), cell(row.b, "backward", most, isOpen));
      line.setAttribute("role", "treeitem");
      line.setAttribute("aria-level", String(row.d + 1));
      if (inner) line.setAttribute("aria-expanded", String(isOpen));
      line.setAttribute("aria-selected", String(at === chosen));
      line.dataset.row = at;
      const words = [row.f.w, row.b.w].map((side, which) => side[colour.value] && `${["forward", "backward"][which]} ${side[colour.value]}`);
      line.setAttribute("aria-label", [row.t, ...words].filter(Boolean).join(", "));
      return line;
    }));
    tree.append(bands);
    root.classList.toggle("ortlab-oneside", !map.backward);
    connect(closed);
    explain(walked.found);
    if (focus) tree.querySelector(`[data-row="${chosen}"]`)?.focus({ preventScroll: false });
  }

  function connect(closed) {
    bands.replaceChildren();
    const from = tree.querySelector(".ortlab-forward"), to = tree.querySelector(".ortlab-backward");
    if (!from || !to || !map.backward) return;
    const place = new Map(visible.map((at, order) => [at, order]));
    const shown = (at) => { while (at >= 0 && !closed.has(at)) at = map.rows[at].p; return at; };
    const flows = new Map();
    for (const [maker, reader, bytes] of map.kept) {
      const [one, other] = [shown(maker), shown(reader)];
      if (one < 0 || other < 0) continue;
      const key = `${one} ${other}`;
      flows.set(key, (flows.get(key) ?? 0) + (map.sized ? bytes : 1));
    }
    const out = new Map(), into = new Map();
    for (const [key, size] of flows) {
      const [one, other] = key.split(" ").map(Number);
      out.set(one, (out.get(one) ?? 0) + size);
      into.set(other, (into.get(other) ?? 0) + size);
    }
    const largest = Math.max(1, ...out.values(), ...into.values());
    const scale = (ROW * THICK) / largest;
    const left = from.offsetLeft + from.offsetWidth, right = to.offsetLeft;
    const middle = (left + right) / 2;
    bands.setAttribute("width", tree.clientWidth);
    bands.setAttribute("height", ROW * visible.length);
    const at = { out: new Map(), into: new Map() };
    const start = (side, totals, row) => at[side].get(row) ?? (place.get(row) + 0.5) * ROW - (totals.get(row) * scale) / 2;
    const ordered = [...flows].map(([key, size]) => [...key.split(" ").map(Number), size])
      .sort((one, other) => one[0] - other[0] || one[1] - other[1]);
    for (const [one, other, size] of ordered) {
      const width = size * scale;
      const y1 = start("out", out, one), y2 = start("into", into, other);
      at.out.set(one, y1 + width);
      at.into.set(other, y2 + width);
      const [a, b] = [y1 + width / 2, y2 + width / 2];
      const band = draw("path", { d: `M${left},${a}C${middle},${a} ${middle},${b} ${right},${b}`, "stroke-width": Math.max(0.75, width),
        class: "ortlab-band" }, bands);
      band.dataset.from = one;
      band.dataset.to = other;
    }
    light();
  }

  function light() {
    const some = chosen >= 0 && visible.includes(chosen);
    const under = (at) => { while (at > chosen) at = map.rows[at].p; return at === chosen; };
    bands.classList.toggle("ortlab-dimmed", some);
    for (const band of bands.children) {
      band.classList.toggle("ortlab-lit", some && (under(Number(band.dataset.from)) || under(Number(band.dataset.to))));
    }
  }

  function explain(found) {
    const shades = colour.value === "operator" ? Object.entries(map.kinds).map(([kind, words]) => [map.colours[kind], words])
      : colour.value === "difference" ? Object.entries(map.marks).map(([mark, count]) => [map.colours[mark], `${count} ${mark}`]) : [];
    legend.replaceChildren(...shades.map(([shade, words]) => {
      const spot = make("i");
      spot.style.background = shade;
      return make("span", {}, spot, words);
    }));
    if (["operator", "time"].includes(colour.value) && map.rows.some((row) => row.b.r)) legend.append(make("span", {}, make("i", { className: "ortlab-again" }), "recomputed"));
    if (map.kept.length) legend.append(make("span", {}, make("i", { className: "ortlab-bandkey" }), map.sized
      ? "kept: as wide as its bytes, from where it is made to where it is read last" : "kept: as wide as the number of values"));
    heads.replaceChildren(...["", "forward", map.backward ? "kept" : "", map.backward ? "backward" : ""].map((words) => make("span", { textContent: words })));
    const hits = search.value.trim() ? `${found} found. ` : "";
    const view = model.get("shown");
    said.textContent = hits + [view.stale, `${map.summary}.`].filter(Boolean).join(" ");
    said.classList.toggle("ortlab-warn", Boolean(view.stale));
  }

  function inform() {
    if (!map) return;
    const row = map.rows[chosen];
    if (!row) {
      const [title, ...lines] = map.about ?? [];
      facts.replaceChildren(...(title ? [make("h5", { textContent: title })] : []), ...lines.map((textContent) => make("p", { textContent })),
        make("p", { className: "ortlab-quiet", textContent: HOW }));
      return;
    }
    const list = make("dl");
    for (const [name, words] of row.facts) list.append(make("dt", { textContent: name }), make("dd", { textContent: words }));
    facts.replaceChildren(make("h5", { textContent: row.t }), list);
    if (map.sized && !map.planned && row.facts.some(([name]) => name === "keeps")) facts.append(plans);
    if (row.n?.length) {
      const around = make("button", { type: "button", textContent: "Show the nodes around it", className: "jupyter-button" });
      around.addEventListener("click", () => send("nodes", row.n[0]));
      facts.append(around);
    }
  }

  // ---- acting -------------------------------------------------------------------------------------------------

  function choose(at, focus = true) {
    chosen = at;
    for (const line of tree.querySelectorAll(".ortlab-maprow")) {
      const it = Number(line.dataset.row) === at;
      line.setAttribute("aria-selected", String(it));
      line.tabIndex = it || (at < 0 && line === tree.firstChild) ? 0 : -1;
      if (it && focus) line.focus();
    }
    light();
    inform();
  }

  function fold(at, on = !open.has(at)) {
    if (!children[at].length || search.value.trim()) return;
    open[on ? "add" : "delete"](at);
    chosen = at;
    paint(true);
    inform();
  }

  tree.addEventListener("click", (event) => {
    const line = event.target.closest(".ortlab-maprow");
    if (!line) return;
    const at = Number(line.dataset.row);
    if (event.target.closest(".ortlab-mapfold")) fold(at);
    else choose(at === chosen && event.detail === 1 ? -1 : at);
  });
  tree.addEventListener("dblclick", (event) => {
    const line = event.target.closest(".ortlab-maprow");
    if (line && !event.target.closest(".ortlab-mapfold")) fold(Number(line.dataset.row));
  });
  tree.addEventListener("keydown", (event) => {
    const line = event.target.closest(".ortlab-maprow");
    if (!line || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Number(line.dataset.row), order = visible.indexOf(at);
    const go = { ArrowDown: visible[order + 1], ArrowUp: visible[order - 1], Home: visible[0], End: visible.at(-1) };
    if (event.key in go) { if (go[event.key] !== undefined) choose(go[event.key]); }
    else if (event.key === "ArrowRight") { if (open.has(at)) choose(children[at][0]); else fold(at, true); }
    else if (event.key === "ArrowLeft") { if (open.has(at)) fold(at, false); else if (map.rows[at].p >= 0) choose(map.rows[at].p); }
    else if (event.key === "Enter" || event.key === " ") choose(at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  root.setAttribute("data-lm-suppress-shortcuts", "true");
  colour.addEventListener("change", () => {
    if (colour.value === "time" && map && !map.timed) send("time");
    else if (colour.value === "difference" && map && !map.compared) send("compare", first.value, second.value);
    else paint();
  });
  part.addEventListener("change", () => send("part", part.value));
  search.addEventListener("input", () => paint());
  compare.addEventListener("click", () => send("compare", first.value, second.value));
  plans.addEventListener("click", () => send("plans"));
  nodes.addEventListener("click", () => send("nodes", map?.rows[chosen]?.n?.[0] ?? ""));

  // ---- from Python --------------------------------------------------------------------------------------------

  function fill(select, options, value) {
    const key = JSON.stringify(options);
    if (select.dataset.options !== key) {
      select.dataset.options = key;
      select.replaceChildren(...options.map(([name, words]) => make("option", { value: name, textContent: words })));
      select.value = value;
    }
  }

  function take(told) {
    const first = map === null;
    map = told.map;
    number = told.number;
    children = map.rows.map(() => []);
    map.rows.forEach((row, at) => { if (row.p >= 0) children[row.p].push(at); });
    if (told.colour) colour.value = told.colour;
    if (first || !told.same) {
      explain(0); // the legend takes room
      open = opening();
      chosen = -1;
    }
    root.dataset.ready = String(number);
    paint();
    inform();
  }

  function show() {
    const view = model.get("shown");
    fill(colour, COLOURS, "operator");
    fill(part, view.parts ?? [], view.part);
    partBox.hidden = (view.parts ?? []).length < 2;
    fill(first, view.runs ?? [], view.pair?.[0]);
    fill(second, view.runs ?? [], view.pair?.[1]);
    compare.disabled = (view.runs ?? []).length < 2;
    compare.title = compare.disabled ? "There have to be two runs: press Rerun, or run a step." : "Hold the graphs of two runs against each other";
    if (map) explain(0);
    if (view.number === undefined || view.number === number) return;
    if (held.map?.number === view.number) take(held.map);
    else if (asked !== view.number) { asked = view.number; send("map"); }
  }

  const heard = async (message) => {
    if (message.map === undefined) return;
    const told = { ...message, map: await unpack(message.map) };
    held.map = told;
    if (told.number === model.get("shown").number) { take(told); show(); }
  };
  model.on("change:shown", show);
  model.on("msg:custom", heard);
  const resized = new ResizeObserver(() => { if (map && tree.clientWidth) paint(root.contains(document.activeElement) && document.activeElement.closest(".ortlab-maprow") !== null); });
  resized.observe(drawn);
  show();
  return () => {
    resized.disconnect();
    model.off("change:shown", show);
    model.off("msg:custom", heard);
  };
}
