// Calls of this server: the key, refusals, and events that arrive in pieces.

const STORE = "pagedcore-key";
let askForKey = async () => {};

export const key = {
  get: () => sessionStorage.getItem(STORE) ?? "",
  set: (value) => sessionStorage.setItem(STORE, value),
  // The page sets what opens its dialog; it settles when there is another key.
  onAsk: (ask) => { askForKey = ask; },
  ask: (reason) => askForKey(reason),
};

export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// Return the response; a refusal is thrown, and one for the key asks for another key and tries again.
export async function call(path, options = {}) {
  for (;;) {
    const used = key.get();
    const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}) };
    if (used) headers.Authorization = `Bearer ${used}`;
    const response = await fetch(new URL(path, document.baseURI), {
      method: options.body ? "POST" : "GET", headers, signal: options.signal, cache: "no-store", credentials: "omit",
      body: options.body ? JSON.stringify(options.body) : undefined, redirect: "error", referrerPolicy: "no-referrer",
    });
    if (response.ok) return response;
    const refused = await refusalOf(response);
    if (refused.status !== 401) throw refused;
    if (used === key.get()) await key.ask(used ? "The server does not know this key." : "");
  }
}

async function refusalOf(response) {
  const body = await response.json().catch(() => ({}));
  const seconds = Number(response.headers.get("Retry-After")) || 0;
  return new Refused(response.status, body.error?.message ?? `The server answered ${response.status}.`, seconds);
}

// Yield {name, data} for each event; what is kept between two pieces is less than one event.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n");
        const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
        if (data === undefined) continue;
        const name = lines.find((line) => line.startsWith("event: "))?.slice(7) ?? "";
        yield { name, data: data === "[DONE]" ? null : JSON.parse(data) };
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

// Yield the choices of a streamed completion; an error that comes after the beginning is thrown.
export async function* choices(path, body, signal) {
  const response = await call(path, { body: { ...body, stream: true }, signal });
  for await (const { data } of events(response)) {
    if (data?.error) throw new Refused(500, data.error.message, 0);
    yield* data?.choices ?? [];
  }
}

// Make an element; text is only ever text.
export function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  return made;
}
