// The live view: follows /live while the page is looked at, and shows what it says.

import { call, element, events } from "./api.js";
import { Timeline } from "./timeline.js";

const RECENT_S = 3, SHOWN_QUEUE = 8, SHOWN_ROWS = 64;
const DOES = { prefill: "reads its prompt", decode: "generates", recompute: "computes again" };
const REASONS = {
  rows: "a row", tokens: "room in a step", blocks: "memory blocks", company: "company", prefix: "a prefix that another computes",
  transfer: "blocks on their way", phase: "a prompt step", batch: "the end of the batch", new: "the next step",
};

export function startLive(model) {
  const byId = (id) => document.getElementById(id);
  const timeline = new Timeline(byId("timeline"), byId("tip"));
  const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  let controller = null, samples = [], ttfts = [], numEnded = 0, numFrames = 0, shown = () => {};
  const isShown = new Promise((resolve) => { shown = resolve; });

  function say(state, text) {
    const connection = byId("connection");
    connection.dataset.state = state;
    if (connection.textContent !== text) connection.textContent = text;
  }

  async function follow() {
    controller?.abort();
    const mine = controller = new AbortController();
    while (!mine.signal.aborted && !document.hidden) {
      let wait = 1;
      try {
        const response = await call(`live?model=${encodeURIComponent(model())}`, { signal: mine.signal });
        reset();
        for await (const { name, data } of events(response)) {
          if (mine.signal.aborted) return;
          if (name === "done") {
            say("off", "the server is ending");
            timeline.stop();
          } else if (name === "error") {
            throw new Error(data.error.message);
          } else {
            say("on", "live");
            show(data);
          }
        }
      } catch (error) {
        if (mine.signal.aborted) return;
        say("bad", error.status === 429 ? "too many viewers, trying again" : "not connected, trying again");
        wait = error.retryAfter || 2;
      }
      timeline.stop();
      await sleep(wait);
    }
  }

  function reset() {
    samples = [];
    ttfts = [];
    numEnded = numFrames = 0;
    timeline.reset();
  }

  function show(frame) {
    samples.push(frame);
    samples = samples.filter((one) => one.t > frame.t - 10);
    ttfts = [...ttfts, ...frame.ttft].slice(-50);
    numEnded += frame.ended.filter((one) => one[6] && one[6] !== "preempted").length;
    timeline.add(frame);
    showFigures(frame);
    // Why less often: text that changes ten times a second cannot be read.
    if (numFrames++ % 3 === 0 || !frame.rows.length) {
      showLead(frame);
      showBlocks(frame.blocks);
      showQueue(frame);
      showRows(frame);
    }
    shown();
  }

  function showFigures(frame) {
    const recent = samples.filter((one) => one.t > frame.t - RECENT_S);
    const span = Math.max(0.5, Math.min(RECENT_S, frame.t - samples[0].t));
    const sampled = recent.reduce((sum, one) => sum + one.sampled, 0);
    const seconds = samples.reduce((sum, one) => sum + one.itl[0], 0);
    const count = samples.reduce((sum, one) => sum + one.itl[1], 0);
    byId("rate").textContent = String(Math.round(sampled / span));
    setTime("ttft", ttfts.length ? [...ttfts].sort((a, b) => a - b)[ttfts.length >> 1] : null);
    setTime("itl", count ? seconds / count : byId("itl").dataset.seconds ?? null);
    byId("ended").textContent = String(numEnded);
  }

  function setTime(id, seconds) {
    const place = byId(id);
    if (seconds === null) return place.replaceChildren("–");
    place.dataset.seconds = seconds;
    const [value, unit] = seconds < 1 ? [(1000 * seconds).toPrecision(seconds < 0.1 ? 2 : 3), "ms"] : [Number(seconds).toFixed(1), "s"];
    place.replaceChildren(String(Number(value)), " ", element("small", unit));
  }

  function showLead(frame) {
    const bold = (text) => element("b", String(text));
    const lead = byId("lead");
    if (!frame.rows.length && !frame.num_waiting) {
      lead.replaceChildren(numEnded ? "Idle. All requests have ended." : "Nothing runs. Ask something, and watch it here.");
      return;
    }
    const own = "yours" in frame.blocks ? "Your requests have " : "";
    const busy = own ? [own, bold(frame.rows.length), frame.rows.length === 1 ? " row" : " rows"] : [bold(frame.rows.length), " of ", bold(frame.max_rows), " rows busy"];
    lead.replaceChildren(...busy, ", ", bold(frame.num_waiting), frame.num_waiting === 1 ? " request waits." : " requests wait.");
  }

  function showBlocks(blocks) {
    const free = blocks.total - (blocks.running ?? 0) - (blocks.cached ?? 0);
    const entries = "yours" in blocks
      ? [["running", "Held by your rows", blocks.yours], [null, "In all", blocks.total]]
      : [["running", "Used by rows", blocks.running], ["cached", "Cached for later", blocks.cached], ["free", "Free", free]];
    byId("blocks").replaceChildren(...entries.map(([kind, text, count]) => line(kind, text, String(count))),
      ...(blocks.host ? [line(null, "On the host", `${blocks.host_used + blocks.host_cached} of ${blocks.host}`)] : []));
    const bar = byId("blocks-bar");
    const parts = [["running", blocks.running ?? blocks.yours], ["cached", blocks.cached ?? 0]];
    parts.forEach(([kind, count], place) => {
      const part = bar.children[place] ?? bar.appendChild(element("i", "", { class: `swatch ${kind}` }));
      part.style.width = `${100 * count / blocks.total}%`;
      part.style.borderRadius = 0;
    });
  }

  function line(kind, text, count) {
    const made = element("div");
    if (kind) made.append(element("i", "", { class: `swatch ${kind}` }));
    made.append(element("dt", text), element("dd", count));
    return made;
  }

  function showQueue(frame) {
    const counts = new Map();
    for (const [, reason] of frame.queue) counts.set(reason, (counts.get(reason) ?? 0) + 1);
    const parts = [...counts].map(([reason, count]) => `${count} ${count === 1 ? "waits" : "wait"} for ${REASONS[reason] ?? reason}`);
    const more = frame.num_waiting - frame.queue.length;
    byId("queue-summary").textContent = parts.length ? `${parts.join(", ")}${more ? `, and ${more} more` : ""}.` : "Nothing waits.";
    byId("queue").hidden = !frame.queue.length;
    byId("queue").tBodies[0].replaceChildren(...frame.queue.slice(0, SHOWN_QUEUE).map(([label, reason, seconds, , preempted]) =>
      row([label, `${REASONS[reason] ?? reason}${preempted ? " (preempted)" : ""}`], [`${seconds.toFixed(1)} s`])));
  }

  function showRows(frame) {
    byId("rows-summary").textContent = `Rows as a table (${frame.rows.length})`;
    byId("rows").tBodies[0].replaceChildren(...[...frame.rows].sort((a, b) => a[0] - b[0]).slice(0, SHOWN_ROWS)
      .map(([lane, label, kind, , , tokens, blocks]) => row([String(lane + 1), label, DOES[kind]], [String(tokens), String(blocks)])));
  }

  function row(texts, numbers) {
    const made = element("tr");
    made.append(...texts.map((text) => element("td", text)), ...numbers.map((text) => element("td", text, { class: "number" })));
    return made;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? controller?.abort() : follow()));
  follow();
  return { restart: follow, isShown };
}
