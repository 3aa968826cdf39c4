// The page: it shows the graph, searches in it, colours it, and talks with the notebook around it.

import * as host from './host.js';
import * as netron from './view.js';

const page = globalThis.ortlab; // { waiting, model, names, groups, ... } as the loader left it
const LISTED = 50; // matches in the list; their number is told in full
const KINDS = { added: '+', removed: '−', moved: '↕', changed: '~', fused: '⊕' };

const element = (id) => document.getElementById(id);
const say = (kind, facts) => parent.postMessage({ ortlab: kind, ...facts }, '*');

/** Where each node of the graph is drawn: at the top, or in which group. */
class Places {
    constructor({ groups, functions, names }) {
        this.groups = new Map(); // of a group's node: { title, backward, function, members, values }
        this.group = new Map(); // of a member: its group's node
        this.functions = functions; // the names in the body that like groups share
        for (const [name, group] of Object.entries(groups)) {
            const members = group.nodes.map((at) => names[at]);
            this.groups.set(name, { ...group, members });
            for (const member of members) {
                this.group.set(member, name);
            }
        }
        this.shared = new WeakMap(); // of netron's nodes and values: their names in the shared body
    }

    members(name) { // what a node at the top stands for
        const group = this.groups.get(name);
        return group ? group.members : [name];
    }

    /** Give the nodes and values of a shared body the names that they have in one of its groups. */
    rename(target, name) {
        const group = this.groups.get(name);
        const body = this.functions[group.function];
        const nodes = new Map(body.nodes.map((own, at) => [own, group.members[at]]));
        const values = new Map(group.values.map((own, at) => [body.values[at], own]));
        const change = (object, names) => {
            if (object && typeof object.name === 'string') {
                if (!this.shared.has(object)) {
                    this.shared.set(object, object.name);
                }
                const known = this.shared.get(object);
                Object.defineProperty(object, 'name', { value: names.get(known) ?? known, configurable: true, writable: true });
            }
        };
        const all = (list) => {
            for (const argument of list || []) {
                for (const value of Array.isArray(argument.value) ? argument.value : []) {
                    change(value, values);
                }
            }
        };
        for (const node of target.nodes) {
            change(node, nodes);
            all(node.inputs);
            all(node.outputs);
        }
        for (const list of [target.inputs, target.outputs]) {
            for (const argument of list || []) {
                change(argument, values);
            }
            all(list);
        }
    }
}

class View extends netron.View {
    constructor(host, places) {
        super(host);
        this.places = places;
        this.opened = []; // the group's node of each level that is open, the innermost first
        this.quiet = false;
        this.colours = {};
        this.entitled = new WeakSet();
    }

    /** Called by Netron when the selection changes: once for the old one, once for the new one. */
    _selectionChangeHandler() {
        if (!this.quiet) {
            clearTimeout(this.telling);
            this.telling = setTimeout(() => this.tellSelection(), 0);
        }
    }

    tellSelection() {
        const names = [];
        const values = [];
        for (const chosen of this.target ? this.target.selection : []) {
            const { value } = chosen;
            if (value && value.type && value.type.name !== undefined && Array.isArray(value.inputs)) {
                names.push(...this.originals(value.name));
            } else if (value && value.name) {
                values.push(value.name);
            }
        }
        say('selected', { names, values });
    }

    /** The group that is open; undefined at the top. */
    get open_group() {
        return this.opened.find((name) => name);
    }

    /** The names, in the graph that was handed over, of what a drawn node stands for. */
    originals(name) {
        return this.open_group ? [name] : this.places.members(name);
    }

    /** The name under which a node is drawn now; undefined if it is not. */
    drawn(name) {
        const group = this.places.group.get(name);
        return this.open_group ? (group === this.open_group ? name : undefined) : group || name;
    }

    async pushTarget(graph, context) {
        if (!graph || graph === this.activeTarget || !Array.isArray(graph.nodes)) {
            return;
        }
        const before = { model: this.model, path: this._path, opened: this.opened };
        this.opened = [context && this.places.groups.has(context.name) ? context.name : '', ...this.opened];
        await super.pushTarget(graph, context);
        if (!this.model) { // its layout was given up
            this.opened = before.opened;
            await this._updateTarget(before.model, before.path);
            this.host.message('This part is too large to be placed.');
        }
    }

    async render(target, signature) {
        this.opened = this.opened.slice(this.opened.length - Math.max(0, this._path.length - 1));
        if (target) {
            const [group] = this.opened;
            if (group) {
                this.places.rename(target, group);
            }
            this.entitle(target.nodes);
        }
        const status = await super.render(target, signature);
        this.paint();
        return status;
    }

    /** Head each group with its own module, though like groups share one function. */
    entitle(nodes) {
        for (const node of nodes) {
            const group = this.places.groups.get(node.name);
            if (group && !this.entitled.has(node)) {
                this.entitled.add(node);
                node.type = Object.create(node.type, {
                    name: { value: group.title },
                    identifier: { value: node.name }, // for the path of what is open
                    category: { value: group.backward ? 'Tensor' : 'Layer' }, // which Netron has colours for
                });
            }
        }
    }

    /** The drawn nodes by name. */
    nodes() {
        const found = new Map();
        for (const node of this.activeTarget ? this.activeTarget.nodes : []) {
            if (!found.has(node.name)) {
                found.set(node.name, node);
            }
        }
        return found;
    }

    /** Select nodes, return the names of those that are not drawn; a group is opened if all that is asked for is in it. */
    async choose(names) {
        const groups = new Set(names.map((name) => this.places.group.get(name)));
        const [group] = groups;
        this.quiet = true;
        try {
            if (groups.size !== 1 || !group || names.length >= this.places.groups.get(group).members.length) {
                await this.leave();
            } else if (this.open_group !== group) {
                await this.leave();
                const node = this.nodes().get(group);
                if (node) {
                    await this.pushTarget(node.type, node);
                }
            }
            const present = this.nodes();
            const chosen = new Set();
            const missing = [];
            for (const name of names) {
                const node = present.get(this.drawn(name));
                if (node) {
                    chosen.add(node);
                } else {
                    missing.push(name);
                }
            }
            if (this.target) {
                const drawn = this.target.select([...chosen], 'ortlab');
                if (chosen.size > 0) {
                    this.target.scrollTo(drawn, 'auto');
                }
                this.inform([...chosen]);
            }
            status(missing.length ? `${missing.length} of ${names.length} nodes are not in this view.` : '');
            return missing;
        } finally {
            this.quiet = false;
        }
    }

    /** Let the side bar, if it is open, be about what is selected now and not about what was before. */
    inform(chosen) {
        if (!this._sidebar?._stack?.length || ['find', 'model', 'target'].includes(this._sidebar.identifier)) {
            return;
        }
        if (chosen.length === 1) {
            this.showNodeProperties(chosen[0]);
        } else {
            this._sidebar.close();
        }
    }

    async leave() {
        while (this._path.length > 1) {
            await this.popTarget();
        }
    }

    /** Mark the nodes that are drawn with the colours of those that they stand for. */
    paint() {
        if (!this.target) {
            return;
        }
        for (const { label } of this.target.nodes.values()) {
            const { element: drawn, value } = label;
            if (drawn && value && typeof value.name === 'string') {
                const kinds = new Set();
                for (const name of this.originals(value.name)) {
                    if (Object.hasOwn(this.colours, name)) {
                        kinds.add(this.colours[name]);
                    }
                }
                mark(drawn, [...kinds]);
            }
        }
    }
}

function mark(drawn, kinds) {
    for (const old of drawn.querySelectorAll('.ortlab-mark')) {
        old.remove();
    }
    const border = drawn.querySelector('.node-border');
    if (!border) {
        return;
    }
    const kind = kinds.length === 1 ? kinds[0] : kinds.length ? 'changed' : '';
    border.classList.remove(...Object.keys(KINDS).map((name) => `ortlab-${name}`));
    border.style.removeProperty('stroke');
    border.style.removeProperty('stroke-width');
    if (KINDS[kind]) {
        border.classList.add(`ortlab-${kind}`);
        const text = document.createElementNS('http://www.w3.org/2000/svg', 'text');
        text.setAttribute('class', `ortlab-mark ortlab-${kind}`);
        text.setAttribute('x', -12);
        text.setAttribute('y', 14);
        text.textContent = KINDS[kind];
        const title = document.createElementNS('http://www.w3.org/2000/svg', 'title');
        title.textContent = kinds.join(', ');
        text.appendChild(title);
        drawn.appendChild(text);
    } else if (/^#[0-9a-f]{6}$/i.test(kind)) {
        border.style.stroke = kind;
        border.style.strokeWidth = '3px';
    }
}

function status(text) {
    element('ortlab-status').textContent = text || page.reduced;
}

// ---- search -----------------------------------------------------------------------------------------------------

class Search {
    constructor(view, names, operators) {
        this.view = view;
        this.names = names;
        this.lower = names.map((name, at) => `${name}\n${operators[at]}`.toLowerCase());
        this.operators = operators;
        this.found = [];
        const input = element('ortlab-search');
        input.addEventListener('input', () => this.run(input.value));
        input.addEventListener('keydown', (event) => {
            event.stopPropagation(); // Netron's own keys
            this.key(event);
        });
        element('ortlab-found').addEventListener('keydown', (event) => {
            event.stopPropagation();
            this.key(event);
        });
    }

    run(text) {
        const started = performance.now();
        const terms = text.toLowerCase().split(/\s+/).filter(Boolean);
        this.found = [];
        if (terms.length) {
            for (let at = 0; at < this.lower.length; at += 1) {
                if (terms.every((term) => this.lower[at].includes(term))) {
                    this.found.push(at);
                }
            }
        }
        this.list(text.trim() !== '');
        const names = this.found.slice(0, LISTED).map((at) => this.names[at]);
        say('found', { text, count: this.found.length, names, ms: performance.now() - started });
    }

    list(asked) {
        const box = element('ortlab-found');
        box.replaceChildren();
        for (const at of this.found.slice(0, LISTED)) {
            const item = document.createElement('button');
            item.type = 'button';
            item.textContent = short(this.names[at]);
            item.title = this.names[at].slice(0, 1000);
            const operator = document.createElement('span');
            operator.textContent = this.operators[at];
            item.appendChild(operator);
            item.addEventListener('click', () => this.open(at));
            box.appendChild(item);
        }
        box.hidden = !this.found.length;
        const more = this.found.length > LISTED ? `, the first ${LISTED} listed` : '';
        element('ortlab-count').textContent = asked ? `${this.found.length} found${more}` : '';
    }

    async open(at) {
        const name = this.names[at];
        element('ortlab-found').hidden = true;
        await this.view.choose([name]);
        say('selected', { names: [name], values: [] });
    }

    key(event) {
        const items = [...element('ortlab-found').children];
        const at = items.indexOf(document.activeElement);
        if (event.key === 'ArrowDown' && items.length) {
            items[Math.min(at + 1, items.length - 1)].focus();
            event.preventDefault();
        } else if (event.key === 'ArrowUp' && at >= 0) {
            (at ? items[at - 1] : element('ortlab-search')).focus();
            event.preventDefault();
        } else if (event.key === 'Enter' && at < 0 && this.found.length) {
            this.open(this.found[0]);
        } else if (event.key === 'Escape') {
            element('ortlab-search').value = '';
            element('ortlab-search').focus();
            this.run('');
        }
    }
}

const short = (name) => (name.length > 80 ? `${name.slice(0, 30)}…${name.slice(-48)}` : name);

// ---- messages ---------------------------------------------------------------------------------------------------

async function take(message, view, search) {
    switch (message && message.ortlab) {
        case 'select':
            say('shown', { missing: await view.choose(strings(message.names)) });
            break;
        case 'colour':
            view.colours = plain(message.colours);
            view.paint();
            break;
        case 'search':
            element('ortlab-search').value = String(message.text);
            search.run(String(message.text));
            break;
        case 'theme':
            useTheme(message.theme);
            break;
        case 'said': // the notebook says beside the frame what was reduced
            page.reduced = '';
            status('');
            break;
        default:
    }
}

const strings = (names) => (Array.isArray(names) ? names.filter((name) => typeof name === 'string') : []);
const plain = (colours) => Object.fromEntries(Object.entries(colours || {}).filter(([, kind]) => typeof kind === 'string'));

function useTheme(theme) {
    const media = { dark: 'all', light: 'not all' }[theme] || '(prefers-color-scheme: dark)';
    element('ortlab-dark').media = media;
}

// ---- start ------------------------------------------------------------------------------------------------------

async function seen() { // labels of a graph that is drawn while hidden stand in wrong places
    await new Promise((resolve) => {
        const observer = new IntersectionObserver((entries) => {
            if (entries.some((entry) => entry.isIntersecting && entry.boundingClientRect.width > 0)) {
                observer.disconnect();
                resolve();
            }
        });
        observer.observe(document.body);
    });
}

async function start() {
    const begun = host.firstWorker();
    await seen();
    const started = performance.now();
    say('begun', {});
    page.worker = await begun;
    page.serial = !page.worker;
    if (page.serial && page.heavy) { // nothing could end it
        throw new Error('The nodes could not be placed: so many need a worker, which may not be started here.');
    }
    const places = new Places(page);
    // Netron looks for its style sheet by address when it saves a picture.
    Object.defineProperty(element('ortlab-light').sheet, 'href', { value: 'ortlab:/grapher.css' });
    document.title = page.file.replace(/\.onnx$/, ''); // what Netron names exported pictures after
    const netronHost = new host.Host(page);
    const view = new View(netronHost, places);
    view.colours = plain(page.colours);
    page.view = view;
    const search = new Search(view, page.names, page.operatorOf.map((at) => page.operatorNames[at]));
    await view.start();
    withoutFiles(view);
    view.show('welcome spinner');
    const file = new host.ModelFile(netronHost, page.file, page.model);
    const model = await view.open(file);
    if (!model || netronHost.cancelled || !view.target) {
        throw new Error(`The nodes could not be placed: ${netronHost.cancelled || 'Netron gave up'}.`);
    }
    view.show(null);
    element('ortlab-wait').remove();
    status('');
    document.body.classList.add('ortlab-ready');
    addEventListener('message', ({ source, data }) => {
        if (source === parent) {
            queue = queue.then(() => take(data, view, search)).catch((error) => console.warn(error));
        }
    });
    let queue = Promise.resolve();
    if (page.around) {
        await view.choose([page.around]);
    }
    for (const message of page.waiting.splice(0)) {
        await take(message, view, search);
    }
    page.received();
    const facts = { ms: Math.round(performance.now() - started), nodes: document.querySelectorAll('g.graph-node').length };
    document.documentElement.dataset.ortlab = JSON.stringify({ ...facts, serial: page.serial });
    say('ready', facts);
}

/** Take out of Netron's menu what needs files or the network. */
function withoutFiles(view) {
    for (const group of (view._menu && view._menu.items) || []) {
        group.items = group.items.filter((item) => {
            const unusable = item.type === 'command' && /^&?(Open|Report)/.test(String(item.label));
            if (unusable) {
                view._menu.unregister(item);
            }
            return !unusable;
        });
    }
}

start().catch((error) => page.fail(error));
