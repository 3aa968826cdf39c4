// Holds the page of a graph in a sandboxed frame and passes on what is selected, in both directions.
// The frame has an origin of its own: it reads nothing of the notebook, and only its own messages are heard here.
// Every text is set as text: names come from models and may hold markup. The exceptions are the still picture, whose
// names ortlab/render/graph_picture.py has escaped, and generated code, which ortlab/render/html.py has.

const LOST =
  "The kernel of this view has ended or was restarted: what is drawn stays, and nothing else acts any more. " +
  "Run the notebook again from the cell that wraps the model.";

function make(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  // JupyterLab takes keys for itself, unless the element that has the focus says this.
  if (["select", "button"].includes(tag)) node.setAttribute("data-lm-suppress-shortcuts", "true");
  node.append(...children);
  return node;
}

function theme() {
  const light = document.body.dataset.jpThemeLight;
  return light === undefined ? "auto" : light === "false" ? "dark" : "light";
}

// `held` is of the widget: its page is kept for every cell that shows it, also when JupyterLab makes it anew on scrolling.
export function render({ model, el }, { held, script }) {
  const send = (act, ...values) => model.send({ do: act, with: values });
  const controls = make("div", { className: "ortlab-tools" });
  const stages = make("select");
  const groups = make("select");
  const stagesBox = make("label", {}, "Stage", stages);
  const groupsBox = make("label", {}, "Draw", groups);
  const around = make("button", { type: "button", textContent: "Show around the selected node" });
  const whole = make("button", { type: "button", textContent: "Back to the whole graph" });
  const refresh = make("button", { type: "button", textContent: "Refresh" });
  const said = make("p", { className: "ortlab-said" });
  said.setAttribute("role", "status");
  const alert = make("p", { className: "ortlab-bad" });
  alert.setAttribute("role", "alert");
  const chosen = make("p", { className: "ortlab-quiet ortlab-chosen" });
  chosen.setAttribute("role", "status");
  const place = make("div", { className: "ortlab-frame" });
  controls.append(stagesBox, groupsBox, around, whole, refresh);
  const beside = make("div", { className: "ortlab-beside" }, place);
  if (model.get("shown").code) {
    const [about, code] = model.get("shown").code;
    const source = make("section", { ariaLabel: about }, make("p", { textContent: about }));
    source.insertAdjacentHTML("beforeend", code);
    beside.append(source);
  }
  const root = make("div", { className: "ortlab ortlab-graph" }, controls, said, alert, beside, chosen);
  el.append(root);

  let frame = null;
  let number = -1; // of the page that the frame has
  let asked = -1; // of the page that was asked for
  let ready = false;
  let told = null; // the selection that came from the frame, which needs not be sent back there
  let lost = false;
  let watch = 0; // gives up a frame that is busy for too long: what happens inside, it can only end while it places nodes

  const post = (message) => {
    if (ready) frame.contentWindow.postMessage(message, "*"); // an opaque origin has no other name
  };
  const postSelection = () => post({ ortlab: "select", names: model.get("selected") });
  const postMarks = () => post({ ortlab: "colour", colours: model.get("marks") });
  const postSearch = () => {
    if (model.get("sought").number) post({ ortlab: "search", text: model.get("sought").text });
  };
  const postTheme = () => post({ ortlab: "theme", theme: theme() });

  function load(page) {
    ready = false;
    clearTimeout(watch);
    frame?.remove();
    frame = make("iframe", { title: model.get("shown").title });
    frame.setAttribute("sandbox", model.get("shown").sandbox);
    frame.style.height = `${model.get("shown").height}px`;
    number = page.number;
    frame.srcdoc = page.html;
    place.replaceChildren(frame);
  }

  function draw() {
    const view = model.get("shown");
    fill(stages, view.stages, view.stage);
    fill(groups, view.groups, view.group);
    stagesBox.hidden = view.stages.length < 2;
    groupsBox.hidden = view.around !== "";
    whole.hidden = view.around === "";
    refresh.hidden = !view.stale;
    alert.textContent = lost ? LOST : view.problem;
    say();
    drawChosen();
    if (view.still) {
      clearTimeout(watch);
      frame = null;
      number = -1;
      ready = false;
      place.innerHTML = view.still;
    } else if (number !== view.number) {
      if (held.page?.number === view.number) load(held.page);
      else if (asked !== view.number && !lost) {
        asked = view.number;
        send("document");
      }
    }
    controls.inert = lost;
  }

  function say() {
    const view = model.get("shown");
    const waits = !view.still && !ready && !lost ? "Drawing the graph ..." : "";
    const marked = view.marked && `Marked: ${view.marked}.`;
    said.textContent = [view.stale, view.why, marked, view.reduced, waits].filter(Boolean).join(" ");
    said.classList.toggle("ortlab-warn", Boolean(view.stale));
  }

  function drawChosen() {
    const names = model.get("selected");
    const more = names.length > 3 ? `, and ${names.length - 3} more` : "";
    const shown = names.slice(0, 3).map((name) => {
      const signs = [...name]; // whole characters: half of an emoji is none
      return signs.length > 120 ? `${signs.slice(0, 80).join("")}…${signs.slice(-39).join("")}` : name;
    });
    chosen.textContent = names.length ? `Selected: ${shown.join(", ")}${more}` : "Click a node: view.selected holds its name.";
    around.disabled = !names.length;
  }

  function fill(select, options, value) {
    const key = JSON.stringify(options);
    if (select.dataset.options !== key) {
      select.dataset.options = key;
      select.replaceChildren(...options.map(([name, words]) => make("option", { value: name, textContent: words })));
    }
    select.value = value;
  }

  function heard(event) {
    if (frame === null || event.source !== frame.contentWindow || !event.data) return;
    const { ortlab: kind, names, reason } = event.data;
    if (kind === "begun") {
      const { number: late, patience } = model.get("shown");
      clearTimeout(watch);
      watch = setTimeout(() => send("failed", late, `It took longer than ${patience / 1000} s.`), patience);
    } else if (kind === "ready") {
      ready = true;
      clearTimeout(watch);
      post({ ortlab: "said" });
      postTheme();
      postMarks();
      if (model.get("selected").length) postSelection();
      postSearch();
      say();
      root.dataset.ready = String(number);
    } else if (kind === "selected" && Array.isArray(names)) {
      told = names.filter((name) => typeof name === "string");
      model.set("selected", told);
      model.save_changes();
      told = null;
      drawChosen();
    } else if (kind === "failed") {
      clearTimeout(watch);
      send("failed", number, String(reason).slice(0, 1000));
    }
  }

  const selected = () => {
    drawChosen();
    if (told === null) postSelection();
  };
  const page = (message) => {
    if (message.html === undefined) return;
    held.page = message;
    if (message.number === model.get("shown").number && message.number !== number && !model.get("shown").still) load(message);
  };
  const ask = (act) => (event) => {
    alert.textContent = "";
    said.textContent = "Working ...";
    act(event);
  };
  stages.addEventListener("change", ask(() => send("stage", stages.value)));
  groups.addEventListener("change", ask(() => send("whole", groups.value)));
  around.addEventListener("click", ask(() => send("around")));
  whole.addEventListener("click", ask(() => send("whole")));
  refresh.addEventListener("click", ask(() => send("refresh")));
  window.addEventListener("message", heard);
  model.on("change:shown", draw);
  model.on("change:selected", selected);
  model.on("change:marks", postMarks);
  model.on("change:sought", postSearch);
  model.on("msg:custom", page);

  const themes = new MutationObserver(postTheme);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  // anywidget takes off the listeners with which ipywidgets marks a view whose kernel has gone. The model of the script
  // is told of it in any case, and the saved form below waits for the mark.
  const life = () => {
    lost = !script.comm_live;
    el.classList.toggle("jupyter-widgets-disconnected", lost);
    draw();
  };
  script.on("comm_live_update", life);
  life();
  return () => {
    clearTimeout(watch);
    window.removeEventListener("message", heard);
    themes.disconnect();
    script.off("comm_live_update", life);
    model.off("change:shown", draw);
    model.off("change:selected", selected);
    model.off("change:marks", postMarks);
    model.off("change:sought", postSearch);
    model.off("msg:custom", page);
  };
}
