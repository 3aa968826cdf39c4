// Looks after the panel that it stands in: ipywidgets gives its elements no roles, drops the focus when a button is
// greyed out, and says nothing when the kernel has gone.

const LOST =
  "The kernel of this panel has ended or was restarted, so nothing here acts any more. " +
  "Run the notebook again from the cell that wraps the model.";

const SCROLLS = "a table or text that scrolls";

const PAUSE = 60; // ms without a change before the elements are looked at: many messages make one change

const NARROW = 560; // px of the panel, not of the window

const HERE = ".ortlab-save, .ortlab-graph, .ortlab-here"; // what the browser does alone, and what says itself that it waits

function set(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function label(panel, name) {
  set(panel, "role", "region");
  set(panel, "aria-label", `ortlab: ${name}`);
  for (const status of panel.querySelectorAll(".ortlab-live > .widget-html-content")) {
    set(status, "role", "status");
  }
  const pages = [...panel.querySelectorAll(":scope > .ortlab-pages > *")];
  for (const bar of panel.querySelectorAll(":scope > .ortlab-tabbar")) {
    set(bar, "role", "tablist");
    set(bar, "aria-label", "Parts of the panel");
    [...bar.querySelectorAll("button")].forEach((button, at) => {
      const chosen = button.classList.contains("mod-active");
      set(button, "role", "tab");
      set(button, "aria-selected", String(chosen));
      if (!pages[at]) return;
      pages[at].id ||= `ortlab-page-${Math.random().toString(36).slice(2)}`;
      set(button, "aria-controls", pages[at].id);
      set(pages[at], "role", "tabpanel");
      set(pages[at], "aria-label", button.textContent.trim());
    });
  }
  for (const group of panel.querySelectorAll(".widget-toggle-buttons:not(.ortlab-tabbar)")) {
    set(group, "role", "group");
    set(group, "aria-label", group.querySelector(".widget-label")?.textContent || "choice");
    for (const button of group.querySelectorAll("button")) {
      set(button, "aria-pressed", String(button.classList.contains("mod-active")));
    }
  }
  for (const heading of panel.querySelectorAll(".ortlab-fold > button")) {
    set(heading, "aria-expanded", String(heading.classList.contains("mod-active")));
  }
  for (const row of panel.querySelectorAll(".ortlab-switch")) {
    const help = row.querySelector(".ortlab-help");
    const control = row.querySelector("input, select");
    if (!help || !control) continue;
    help.id ||= `ortlab-help-${Math.random().toString(36).slice(2)}`;
    set(control, "aria-describedby", help.id);
  }
  for (const bar of panel.querySelectorAll(".progress")) {
    set(bar, "role", "progressbar");
    set(bar, "aria-label", "Progress");
    const done = parseFloat(bar.querySelector(".progress-bar")?.style.width) || 0;
    set(bar, "aria-valuenow", String(Math.round(done)));
  }
  for (const part of panel.querySelectorAll(".ortlab-scroll, .ortlab-pages")) {
    // What scrolls has to be reached by keyboard.
    const scrolls = part.scrollWidth > part.clientWidth + 1 || part.scrollHeight > part.clientHeight + 1;
    if (scrolls) {
      set(part, "tabindex", "0");
      set(part, "role", "group");
      set(part, "aria-label", SCROLLS);
    } else if (part.getAttribute("aria-label") === SCROLLS) {
      for (const name of ["tabindex", "role", "aria-label"]) part.removeAttribute(name);
    }
  }
}

// The last element that had the focus, as a path of child numbers: the buttons of a group are made anew with new labels.
function pathOf(node, panel) {
  const path = [];
  for (; node !== panel; node = node.parentElement) path.unshift([...node.parentElement.children].indexOf(node));
  return path;
}

export function render({ model, el }) {
  const lost = document.createElement("p");
  lost.className = "ortlab-lost";
  lost.setAttribute("role", "alert");
  lost.hidden = true;
  el.append(lost);
  let panel = null;
  let held = null;
  let path = [];
  let due = 0;

  function look() {
    if (panel === null || !panel.isConnected) return;
    label(panel, model.get("name"));
    panel.classList.toggle("ortlab-narrow", panel.clientWidth < NARROW);
    const gone = panel.classList.contains("jupyter-widgets-disconnected");
    if (gone !== Boolean(lost.textContent)) {
      lost.hidden = !gone;
      lost.textContent = gone ? LOST : "";
      if (gone) waits(false);
      for (const child of panel.children) if (!child.contains(el)) child.inert = gone;
    }
    if (held === null || document.activeElement !== document.body) return;
    const again = held.isConnected ? held : path.reduce((node, at) => node?.children[at], panel);
    if (again && !again.disabled) again.focus({ preventScroll: true });
  }
  const soon = () => {
    clearTimeout(due);
    due = setTimeout(look, PAUSE);
  };
  // A click is answered at once: the panel says that it waits until the kernel has done all that was asked for before.
  // The kernel takes messages in order, so this one, sent after that of the click, comes back when that is done.
  const name = Math.random().toString(36).slice(2);
  let asked = 0;
  const waits = (on) => {
    panel.classList.toggle("ortlab-waits", on);
    set(panel, "aria-busy", String(on));
  };
  const ask = (event) => {
    const control = event.target.closest(event.type === "click" ? "button" : "input, select");
    if (control === null || control.disabled || control.closest(HERE) !== null || lost.textContent) return;
    if (control.closest(".ortlab-tabbar")) panel.lastElementChild.scrollTop = 0; // all tabs scroll in one box
    asked += 1;
    waits(true);
    setTimeout(() => model.send({ asked: `${name} ${asked}` }));
  };
  const answered = (message) => {
    if (message.answered === `${name} ${asked}`) waits(false);
  };
  model.on("msg:custom", answered);
  // ipywidgets knows of restarts that were asked for; of a kernel that dies and is started again it is told here.
  const manager = model.widget_manager;
  manager.ortlab ??= manager.kernel?.statusChanged.connect((_, status) => {
    if (status === "autorestarting" || status === "dead") manager.disconnect();
  });
  const changes = new MutationObserver(soon);
  const entered = (event) => {
    held = event.target;
    path = pathOf(held, panel);
  };
  // A press elsewhere or Tab out of the panel gives the focus up; a button that is greyed out does not.
  const left = (event) => {
    if (event.relatedTarget !== null && !panel.contains(event.relatedTarget)) held = null;
  };
  const pressed = (event) => {
    if (panel !== null && !panel.contains(event.target)) held = null;
  };

  // The element is put into the page after this function has returned.
  const arrival = new ResizeObserver(() => {
    if (panel === null && (panel = el.closest(".ortlab-panel")) !== null) {
      changes.observe(panel, {
        subtree: true, childList: true, attributes: true, attributeFilter: ["class", "style", "disabled"],
      });
      panel.addEventListener("focusin", entered);
      panel.addEventListener("focusout", left);
      panel.addEventListener("click", ask);
      panel.addEventListener("change", ask);
      document.addEventListener("pointerdown", pressed, true);
    }
    soon();
  });
  arrival.observe(el);
  model.on("change:name", soon);
  return () => {
    clearTimeout(due);
    changes.disconnect();
    arrival.disconnect();
    document.removeEventListener("pointerdown", pressed, true);
    panel?.removeEventListener("focusin", entered);
    panel?.removeEventListener("focusout", left);
    panel?.removeEventListener("click", ask);
    panel?.removeEventListener("change", ask);
    model.off("msg:custom", answered);
    model.off("change:name", soon);
  };
}
