(async () => {
  const waiting = [];
  const hear = ({ source, data }) => { if (source === parent) waiting.push(data); };
  addEventListener('message', hear);
  const fail = (error) => {
    document.body.className = 'ortlab-failed';
    document.body.textContent = 'This graph cannot be drawn here. ' + error.message + ' The table above it holds the same graph.';
    document.documentElement.dataset.ortlab = JSON.stringify({ failed: error.message });
    parent.postMessage({ ortlab: 'failed', reason: error.message }, '*');
  };
  try {
    const inflate = async (id) => {
      const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
      const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
      return new Uint8Array(await new Response(stream).arrayBuffer());
    };
    const read = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
    const [page, facts, model] = [read(await inflate('ortlab-page')), read(await inflate('ortlab-facts')), await inflate('ortlab-model')];
    globalThis.ortlab = { ...facts, version: page.version, model, waiting, fail, received: () => removeEventListener('message', hear) };
    for (const [id, css] of Object.entries(page.css)) {
      const style = document.createElement('style');
      style.id = id;
      if (id === 'ortlab-dark') style.media = '(prefers-color-scheme: dark)';
      style.textContent = css;
      document.head.appendChild(style);
    }
    document.body.className = 'welcome spinner';
    document.body.insertAdjacentHTML('afterbegin', page.body);
    const script = document.createElement('script');
    script.textContent = page.script;
    document.head.appendChild(script);
  } catch (error) {
    fail(error);
  }
})();
