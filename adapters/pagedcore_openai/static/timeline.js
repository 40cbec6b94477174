// Draws the rows of the batch over time, and below them, on the same axis, the blocks and the queue.

const WINDOW_S = 10, DELAY_S = 0.15, KEPT = 6000;
const LEFT = 30, RIGHT = 10, TOP = 4, AREA = 44, GAP = 22, AXIS = 20, MIN_ROWS = 6, MAX_HEIGHT = 420;
const NAMES = ["card", "ink", "muted", "line", "track", "prefill", "decode", "recompute", "preempted", "bar-ink",
  "running", "cached", "waiting"];

export class Timeline {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.context = canvas.getContext("2d");
    this.isStill = matchMedia("(prefers-reduced-motion: reduce)");
    this.pointer = null;
    this.reset();
    const readColours = () => {
      const style = getComputedStyle(document.documentElement);
      this.colours = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
      this.draw();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => { this.pointer = { x: event.offsetX, y: event.offsetY }; this.showTip(); });
    canvas.addEventListener("pointerleave", () => { this.pointer = null; this.tip.hidden = true; });
    readColours();
    this.lastDrawn = 0;
    const tick = (now) => {
      if (now - this.lastDrawn > (this.isStill.matches ? 1000 : 32) && this.hasSomething()) {
        this.lastDrawn = now;
        this.draw();
      }
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  reset() {
    this.stretches = [];
    this.rows = [];
    this.samples = [];
    this.clock = null;
    this.stoppedAt = null;
    this.numLanes = MIN_ROWS;
    if (this.colours) this.draw();
  }

  stop() {
    this.stoppedAt ??= this.now();
  }

  add(frame) {
    const arrived = performance.now() / 1000;
    // Why smoothed: frames arrive a little early or late, and time must not jump.
    const offset = frame.t - arrived;
    this.clock = this.clock === null || Math.abs(offset - this.clock) > 0.5 ? offset : this.clock + 0.1 * (offset - this.clock);
    this.rows = frame.rows;
    const oldest = frame.t - WINDOW_S - 1;
    this.stretches = [...this.stretches.filter((one) => one[4] > oldest), ...frame.ended].slice(-KEPT);
    this.samples = [...this.samples.filter((one) => one.t > oldest - 3), { t: frame.t, blocks: frame.blocks, waiting: frame.num_waiting }];
    const lanes = [...this.rows, ...this.stretches].reduce((most, one) => Math.max(most, one[0] + 1), MIN_ROWS);
    this.numLanes = Math.max(this.numLanes, lanes);
  }

  now() {
    return this.stoppedAt ?? (this.clock === null ? 0 : performance.now() / 1000 + this.clock - DELAY_S);
  }

  hasSomething() {
    if (this.clock === null || this.stoppedAt !== null) return false;
    const last = Math.max(0, ...this.stretches.map((one) => one[4]));
    // Why one step of the window longer: so that the last bar leaves the picture.
    return this.rows.length > 0 || this.now() - last < WINDOW_S + 0.5 || this.samples.at(-1).waiting > 0;
  }

  layout() {
    const width = this.canvas.clientWidth;
    const most = window.innerWidth <= 640 ? 260 : MAX_HEIGHT;
    const pitch = Math.max(4, Math.min(24, Math.floor(most / this.numLanes)));
    const rowsHeight = pitch * this.numLanes;
    const blocksTop = TOP + rowsHeight + GAP, queueTop = blocksTop + AREA + GAP;
    return { width, pitch, rowsHeight, blocksTop, queueTop, height: queueTop + AREA + AXIS };
  }

  draw() {
    const { canvas, context: c, colours } = this;
    const place = this.layout();
    if (!place.width) return;
    const ratio = window.devicePixelRatio || 1;
    const pixels = [Math.round(place.width * ratio), Math.round(place.height * ratio)];
    if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) {
      [canvas.width, canvas.height] = pixels;
      canvas.style.height = `${place.height}px`;
    }
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, place.width, place.height);
    const now = this.now(), scale = (place.width - LEFT - RIGHT) / WINDOW_S;
    const x = (t) => LEFT + (t - now + WINDOW_S) * scale;
    this.hits = [];
    this.font = getComputedStyle(canvas).fontFamily;
    c.textBaseline = "middle";
    this.drawLanes(place);
    this.drawAxis(place, now, x);
    c.save();
    c.beginPath();
    c.rect(LEFT, 0, place.width - LEFT - RIGHT, place.height);
    c.clip();
    this.drawRows(place, x);
    this.drawBlocks(place, x);
    this.drawQueue(place, x);
    c.restore();
    c.fillStyle = colours.muted;
    this.text("Blocks", LEFT, place.blocksTop - 9, "left", 11);
    this.text("Queue", LEFT, place.queueTop - 9, "left", 11);
    const last = this.samples.at(-1);
    if (last) {
      this.text(`of ${last.blocks.total}`, place.width - RIGHT, place.blocksTop - 9, "right", 11);
      this.text(`at most ${Math.max(...this.samples.map((one) => one.waiting))}`, place.width - RIGHT, place.queueTop - 9, "right", 11);
    }
    this.showTip();
  }

  text(text, x, y, align, size) {
    this.context.font = `${size}px ${this.font}`;
    this.context.textAlign = align;
    this.context.fillText(text, x, y);
  }

  drawLanes({ width, pitch }) {
    const { context: c, colours } = this;
    for (let lane = 0; lane < this.numLanes; lane++) {
      c.fillStyle = colours.track;
      c.globalAlpha = 0.55;
      c.fillRect(LEFT, TOP + lane * pitch + 1, width - LEFT - RIGHT, pitch - 2);
      c.globalAlpha = 1;
      const every = pitch >= 14 ? 1 : pitch >= 8 ? 4 : 8;
      if (lane % every === 0) {
        c.fillStyle = colours.muted;
        this.text(String(lane + 1), LEFT - 8, TOP + (lane + 0.5) * pitch, "right", 11);
      }
    }
  }

  drawAxis({ width, height, queueTop }, now, x) {
    const { context: c, colours } = this;
    c.fillStyle = colours.line;
    c.fillRect(LEFT, queueTop + AREA, width - LEFT - RIGHT, 1);
    c.fillStyle = colours.muted;
    const step = width < 480 ? 5 : 2;
    for (let back = 0; back <= WINDOW_S; back += step) {
      const label = back ? `−${back} s` : "now";
      this.text(label, x(now - back), height - AXIS / 2, back === WINDOW_S ? "left" : back ? "center" : "right", 11);
    }
  }

  drawRows({ pitch }, x) {
    for (const one of this.stretches) this.drawStretch(one, one[6], pitch, x);
    for (const one of this.rows) this.drawStretch(one, "", pitch, x);
  }

  drawStretch(one, ending, pitch, x) {
    const { context: c, colours } = this;
    const [lane, label, kind, start, end] = one;
    const left = x(start), right = Math.max(x(end), left + 1);
    if (right < LEFT) return;
    // Why a gap only behind an ending: a request is one bar, whatever it does.
    const top = TOP + lane * pitch + 1, height = pitch - 2, width = Math.max(1, right - left - (ending ? 2 : 0));
    c.fillStyle = colours[kind];
    c.fillRect(left, top, width, height);
    if (ending === "preempted") {
      c.fillStyle = colours.preempted;
      c.fillRect(left + width - 4, top, 4, height);
    }
    const from = Math.max(left, LEFT);
    if (kind !== "prefill" && pitch >= 12 && right - from > 8 * label.length + 8) {
      c.fillStyle = colours["bar-ink"];
      this.text(label, from + 5, top + height / 2 + 0.5, "left", Math.min(12, pitch - 4));
    }
    this.hits.push({ left, right: left + Math.max(width, 4), top, bottom: top + height, one, ending });
  }

  // Draw what `read` gives as an area from `bottom` up; samples hold until the next one.
  area(x, bottom, most, read, colour) {
    const { context: c, samples } = this;
    if (!samples.length) return;
    c.fillStyle = colour;
    c.beginPath();
    c.moveTo(x(samples[0].t), bottom);
    let y = bottom;
    for (const one of samples) {
      c.lineTo(x(one.t), y);
      y = bottom - AREA * Math.min(1, read(one) / Math.max(1, most));
      c.lineTo(x(one.t), y);
    }
    const end = Math.max(x(samples.at(-1).t), x(this.now()));
    c.lineTo(end, y);
    c.lineTo(end, bottom);
    c.fill();
  }

  drawBlocks({ width, blocksTop }, x) {
    const { colours, samples } = this;
    const bottom = blocksTop + AREA, total = samples.at(-1)?.blocks.total ?? 1;
    this.context.globalAlpha = 0.55;
    this.context.fillStyle = colours.track;
    this.context.fillRect(LEFT, blocksTop, width - LEFT - RIGHT, AREA);
    this.context.globalAlpha = 1;
    this.area(x, bottom, total, ({ blocks }) => (blocks.running ?? blocks.yours) + (blocks.cached ?? 0), colours.cached);
    this.area(x, bottom, total, ({ blocks }) => blocks.running ?? blocks.yours, colours.running);
  }

  drawQueue({ queueTop }, x) {
    const most = Math.max(4, ...this.samples.map((one) => one.waiting));
    this.area(x, queueTop + AREA, most, (one) => one.waiting, this.colours.waiting);
  }

  showTip() {
    const { pointer, tip } = this;
    const hit = pointer && this.hits?.find((one) => pointer.x >= one.left && pointer.x <= one.right
      && pointer.y >= one.top && pointer.y <= one.bottom);
    tip.hidden = !hit;
    if (!hit) return;
    const [lane, label, kind, start, end, tokens] = hit.one;
    const does = { prefill: "prompt", decode: "generating", recompute: "computed again" }[kind];
    const ended = hit.ending ? `, then ${hit.ending === "preempted" ? "preempted" : `ended (${hit.ending})`}` : "";
    tip.textContent = `Request ${label}, row ${lane + 1}: ${does}, ${tokens} tokens in ${Math.round(1000 * (end - start))} ms${ended}`;
    const width = this.canvas.clientWidth;
    tip.style.left = `${Math.max(0, Math.min(pointer.x + 16, width - 220))}px`;
    tip.style.top = `${this.canvas.offsetTop + pointer.y + 18}px`;
  }
}
