// What Netron asks of the program around it, answered from what the page carries.
//
// Netron's own browser host is not in the page: it holds the lock of old versions, the cookie notice and the telemetry.

import * as base from './base.js';
import * as onnx from './onnx.js';
import * as proto from './onnx-proto.js';

const MODULES = { './onnx': onnx, './onnx-proto': proto };

export class Missing extends Error {}

/** The bytes of the model, as Netron reads a file. */
export class ModelFile {
    constructor(host, identifier, bytes) {
        this.host = host;
        this.identifier = identifier;
        this.name = identifier;
        this.stream = new base.BinaryStream(bytes);
    }

    async asset(file) {
        return this.host.asset(file);
    }

    async request(file) { // what Netron 8 calls `asset`
        return this.host.asset(file);
    }

    async fetch(file) {
        throw new Missing(`The graph names the file ${file}, which the view does not carry.`);
    }

    async require(id) {
        return this.host.require(id);
    }

    error(error) {
        this.host.exception(error);
    }
}

/** Netron's host: no network, no cookies, no storage, no telemetry, no lock by date. */
export class Host {
    constructor(page) {
        this.page = page; // { operators, serial, patience, link(url) }
        this.window = window;
        this.document = document;
        this.type = 'ortlab';
        this.version = page.version;
        this.cancelled = false;
        this.chosen = {};
        this.known = {
            name: 'Netron',
            menu: true,
            packaged: false,
            serial: page.serial,
            platform: /(Mac|iPhone|iPod|iPad)/i.test(navigator.platform) ? 'darwin' : undefined,
            agent: /safari/i.test(navigator.userAgent) && !/chrome/i.test(navigator.userAgent) ? 'safari' : '',
            repository: 'https://github.com/lutzroeder/netron',
        };
    }

    async view(view) {
        this.shown = view;
    }

    async start() {}

    environment(name) {
        return this.known[name];
    }

    async require(id) {
        if (MODULES[id]) {
            return MODULES[id];
        }
        throw new Missing(`The view reads ONNX only, not ${id}.`);
    }

    async asset(file) {
        return file === 'onnx-metadata.json' ? this.page.operators : '[]';
    }

    async request(file) {
        return this.asset(file);
    }

    async fetch(file) {
        throw new Missing(`The view has no network (${file}).`);
    }

    /** The worker that was started to see whether there may be one, and after it was ended, another. */
    worker() {
        const first = this.page.worker;
        this.page.worker = null;
        return first || layoutWorker(''); // Netron takes whatever it hears for a layout
    }

    /** Netron asks "Cancel?" 2.5 s into a layout; without an answer the layout is given up after `patience` ms. */
    async message(text, alert, action) {
        const box = document.getElementById('ortlab-notice');
        clearTimeout(this.timer);
        box.hidden = !text;
        if (!text) {
            return 0;
        }
        const button = document.getElementById('ortlab-notice-button');
        document.getElementById('ortlab-notice-text').textContent =
            action === 'Cancel' ? 'Placing the nodes takes long.' : text;
        button.textContent = action || 'Close';
        return new Promise((resolve) => {
            const answer = (why) => {
                clearTimeout(this.timer);
                box.hidden = true;
                if (action === 'Cancel') {
                    this.cancelled = why;
                }
                resolve(0);
            };
            button.onclick = () => answer('it was cancelled');
            if (action === 'Cancel') {
                this.timer = setTimeout(() => answer('it took too long'), this.page.patience);
            }
        });
    }

    async execute(name) {
        if (name === 'about') {
            await this.message(`Drawn by Netron ${this.version}, (c) Lutz Roeder, MIT License.`);
        }
    }

    async save(name, extension, defaultPath) {
        return `${defaultPath}.${extension}`;
    }

    async export(file, blob) {
        const link = document.createElement('a');
        link.download = file;
        link.href = URL.createObjectURL(blob);
        link.click();
        URL.revokeObjectURL(link.href);
    }

    openURL(url) {
        this.message(`A graph opens no links. The address is ${url}`);
    }

    exception(error) {
        console.warn(error);
    }

    event() {}

    update() {}

    get() {
        return this.chosen;
    }

    set(name, value) {
        this.chosen = value;
    }

    delete() {
        this.chosen = {};
    }
}

/** A worker that places the nodes: its code is the text of the module that the page carries already. */
function layoutWorker(greeting) {
    const code = `'use strict'; const exports = {}; (${__ortlab_modules['./dagre.js']})(exports);
        self.onmessage = ({ data }) => {
            try { exports.layout(data.nodes, data.edges, data.layout, data.state); self.postMessage(data); }
            catch (error) { self.postMessage({ type: 'error', message: error.message }); }
        };
        ${greeting}`;
    return new Worker(URL.createObjectURL(new Blob([code], { type: 'text/javascript' })));
}

/** Start a worker for the layout; null if the page may have none, as in VS Code with a strict policy. */
export async function firstWorker() {
    return new Promise((resolve) => {
        try {
            const worker = layoutWorker("self.postMessage('here');");
            const end = (answer) => {
                clearTimeout(timer);
                worker.onmessage = null;
                worker.onerror = null;
                if (!answer) {
                    worker.terminate();
                }
                resolve(answer);
            };
            // A page that may have none is told so at once; a busy machine starts one late.
            const timer = setTimeout(() => end(null), 15_000);
            worker.onmessage = () => end(worker);
            worker.onerror = () => end(null);
        } catch {
            resolve(null);
        }
    });
}
