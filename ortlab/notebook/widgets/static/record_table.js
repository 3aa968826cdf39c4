// Draws the table that ortlab/notebook/widgets/record_table.py sends, and sends back what the user wants.
// It computes nothing. Every text is set as text: names come from models and may hold markup.

const FILTER_PAUSE = 200; // ms without a key before the filter is sent

const unique = () => Math.random().toString(36).slice(2);

function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  // JupyterLab takes arrow keys and others for itself, unless the element that has the focus says this.
  if (["input", "select", "button"].includes(tag)) node.setAttribute("data-lm-suppress-shortcuts", "true");
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function render({ model, el }, { unpack }) {
  const send = (act, ...values) => model.send({ do: act, with: values });
  const sliders = new Map();
  let typing = 0;
  let view = null; // what was sent last
  let drawn = ""; // what the rows below show
  let takeBack = []; // sets a control to what its row says
  const asks = new Map(); // what a control was set to and the kernel has not answered yet, by the control's `data-at`

  // A table that was sent before the answer, for something else, does not take back what the user has just set.
  function ask(at, act, ...values) {
    const asked = unique();
    asks.set(at, { asked, value: values.at(-1) });
    model.send({ do: act, with: values, asked });
  }
  const latest = (at, known) => asks.get(at)?.value ?? known;

  const filter = make("input", { type: "search", className: "ortlab-filter" });
  const picker = make("select", { "data-at": "pick" });
  const pickerLabel = make("span");
  const pickerBox = make("label", {}, pickerLabel, picker);
  const found = make("span", { role: "status", className: "ortlab-quiet" });
  const sliderBox = make("div", { className: "ortlab-tools" });
  const tools = make("div", { className: "ortlab-tools" }, make("label", {}, "Filter", filter), found);
  const table = make("table", { className: "ortlab-table" });
  const earlier = make("button", { type: "button", textContent: "Earlier", "data-at": "earlier" });
  const later = make("button", { type: "button", textContent: "Later", "data-at": "later" });
  const pages = make("div", { className: "ortlab-tools" }, earlier, later);
  const root = make(
    "div",
    { className: "ortlab ortlab-records" },
    tools,
    sliderBox,
    make("div", { className: "ortlab-scroll", tabIndex: -1 }, table),
    pages,
  );
  el.append(root);

  const sendFilter = () => {
    clearTimeout(typing);
    typing = 0;
    if (filter.value !== latest("filter", view?.filter)) ask("filter", "filter", filter.value);
  };
  filter.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(sendFilter, FILTER_PAUSE);
  });
  filter.addEventListener("change", sendFilter);
  picker.addEventListener("change", () => ask("pick", "pick", picker.value));
  earlier.addEventListener("click", () => send("turn", -1));
  later.addEventListener("click", () => send("turn", 1));

  function heading(column, sorted) {
    const here = sorted.name === column.name;
    const way = sorted.descending ? "descending" : "ascending";
    const arrow = make("span", { "aria-hidden": "true", className: "ortlab-arrow" });
    arrow.textContent = here ? (sorted.descending ? "▼" : "▲") : "";
    const button = make(
      "button",
      { type: "button", title: column.meaning || null, "data-at": `sort ${column.name}` },
      column.name,
      arrow,
    );
    button.addEventListener("click", () => send("sort", column.name));
    return make(
      "th",
      { scope: "col", "aria-sort": here ? way : "none", className: column.numeric ? "ortlab-number" : "" },
      button,
    );
  }

  function tick(row) {
    const at = `tick ${row.key}`;
    const box = make("input", {
      type: "checkbox",
      checked: latest(at, row.ticked),
      disabled: Boolean(row.locked),
      title: row.locked || null,
      "aria-label": row.name,
      "data-at": at,
    });
    box.addEventListener("change", () => ask(at, "tick", row.key, box.checked));
    takeBack.push(() => (box.checked = latest(at, row.ticked)));
    return make("td", { className: "ortlab-tick" }, box);
  }

  function name(row, text) {
    const inner = make("span", { textContent: text });
    let head = inner;
    if (row.chosen !== null) {
      head = make(
        "button",
        { type: "button", "aria-pressed": String(row.chosen), "data-at": `choose ${row.key}` },
        inner,
      );
      head.addEventListener("click", () => send("choose", row.key));
    }
    const mark = row.mark ? make("span", { className: "ortlab-mark", textContent: row.mark }) : null;
    const code = row.code ? make("code", { textContent: row.code }) : null;
    return make("th", { scope: "row" }, mark, head, code);
  }

  function count(row) {
    const [now, most] = row.count;
    const at = `count ${row.key}`;
    const box = make("input", {
      type: "number",
      min: 1,
      max: most,
      value: latest(at, now),
      disabled: Boolean(row.locked),
      "aria-label": `places of ${row.name}, 1 to ${most}`,
      "data-at": at,
    });
    const back = () => (box.value = latest(at, now));
    box.addEventListener("change", () => {
      if (box.value !== "" && box.checkValidity()) ask(at, "count", row.key, box.valueAsNumber);
      else back();
    });
    takeBack.push(back);
    return make("td", { className: "ortlab-number" }, box, ` of ${most}`);
  }

  function line(row, view) {
    const cells = row.cells.map((text, number) => {
      const column = view.columns[number];
      if (number === 0) return name(row, text);
      if (row.count !== null && column.name === view.count_column) return count(row);
      return make("td", { className: column.numeric ? "ortlab-number" : "", textContent: text });
    });
    if (row.ticked !== null) cells.unshift(tick(row));
    const made = make("tr", {}, ...cells);
    made.classList.toggle("ortlab-marked", Boolean(row.mark));
    made.classList.toggle("ortlab-chosen", Boolean(row.chosen));
    return made;
  }

  // A slider moves on while the kernel works: what it shows last is sent when its answer has come.
  function slider(one) {
    const id = `${one.key}-${unique()}`;
    const at = `range ${one.key}`;
    const range = make("input", { type: "range", id, "data-at": at });
    const number = make("input", {
      type: "number",
      "aria-label": `${one.label}, as a number`,
      "data-at": `number ${one.key}`,
    });
    const state = { at, range, number, next: null };
    state.ask = (value) => {
      number.value = range.value = value;
      if (asks.has(at)) state.next = value;
      else ask(at, "slide", one.key, value);
    };
    range.addEventListener("input", () => state.ask(range.valueAsNumber));
    number.addEventListener("change", () => {
      if (number.value !== "" && number.checkValidity()) state.ask(number.valueAsNumber);
      else number.value = range.value;
    });
    sliderBox.append(
      make("span", { className: "ortlab-slider" }, make("label", { htmlFor: id, textContent: one.label }), range, number),
    );
    return state;
  }

  function drawSliders(wanted) {
    if ([...sliders.keys()].join("\n") !== wanted.map((one) => one.key).join("\n")) {
      sliderBox.replaceChildren();
      sliders.clear();
      for (const one of wanted) sliders.set(one.key, slider(one));
    }
    for (const one of wanted) {
      const state = sliders.get(one.key);
      for (const input of [state.range, state.number]) Object.assign(input, { min: one.low, max: one.high });
      if (!asks.has(state.at)) state.range.value = state.number.value = one.value;
    }
    sliderBox.hidden = wanted.length === 0;
  }

  function drawTools() {
    filter.setAttribute("aria-label", `Filter ${view.noun}`);
    if (!typing && !asks.has("filter") && filter.value !== view.filter) filter.value = view.filter;
    found.textContent = view.found;
    if (view.picker === null) pickerBox.remove();
    else {
      if (!pickerBox.isConnected) found.before(pickerBox);
      pickerLabel.textContent = view.picker.label;
      picker.replaceChildren(
        ...view.picker.options.map(([key, words]) => make("option", { value: key, textContent: words })),
      );
      const back = () => (picker.value = latest("pick", view.picker.value));
      back();
      takeBack.push(back);
    }
    earlier.disabled = !view.pages.earlier;
    later.disabled = !view.pages.later;
    pages.hidden = !view.pages.earlier && !view.pages.later;
  }

  async function draw() {
    const packed = model.get("table");
    const sent = await unpack(packed);
    if (sent === null || packed !== model.get("table")) return; // a later one has come meanwhile
    view = sent;
    const content = JSON.stringify({ ...view, drawn: 0 });
    if (content === drawn) {
      // A key pressed on a control is lost with it, so what has not changed stays; a refused tick is taken back.
      takeBack.forEach((act) => act());
      drawSliders(view.sliders);
      return;
    }
    drawn = content;
    takeBack = [];
    const at = root.contains(document.activeElement) ? document.activeElement.dataset.at : undefined;
    const ticks = view.rows.some((row) => row.ticked !== null);
    const head = make("tr", {}, ...view.columns.map((column) => heading(column, view.sorted)));
    if (ticks) head.prepend(make("td"));
    const totals = make("tr", {}, ...(ticks ? [make("td")] : []));
    view.totals.forEach((text, number) => {
      const numeric = view.columns[number].numeric ? "ortlab-number" : "";
      totals.append(
        number === 0
          ? make("th", { scope: "row", textContent: text })
          : make("td", { className: numeric, textContent: text }),
      );
    });
    table.replaceChildren(
      make("caption", { className: "ortlab-unseen", textContent: view.caption }),
      make("thead", {}, head),
      make("tbody", {}, ...view.rows.map((row) => line(row, view))),
      ...(view.totals.length ? [make("tfoot", {}, totals)] : []),
    );
    drawTools();
    drawSliders(view.sliders);
    if (at !== undefined) {
      const again = [...root.querySelectorAll("[data-at]")].find((node) => node.dataset.at === at);
      const target = again && !again.disabled ? again : [earlier, later].find((node) => !node.disabled);
      (target ?? filter).focus({ preventScroll: true });
    }
  }

  function answered(message) {
    const [at] = [...asks].find(([, one]) => one.asked === message.answered) ?? [];
    if (!asks.delete(at)) return;
    const state = [...sliders.values()].find((one) => one.at === at);
    const next = state?.next ?? null;
    if (next === null) draw();
    else {
      state.next = null;
      state.ask(next);
    }
  }

  model.on("change:table", draw);
  model.on("msg:custom", answered);
  draw();
  return () => {
    clearTimeout(typing);
    model.off("change:table", draw);
    model.off("msg:custom", answered);
  };
}
