// Small charts of the last ten minutes, each with its numbers as text.

import { element, setText } from "./drawing/dom.js";
import { count, percent, plural, tokens } from "./drawing/format.js";
import { SPAN_S } from "./data/series.js";

const SHORTEST_S = 60;

/** Each: title, note (spoken: the same in full), lines ({name, words, colour, value(series, second), text(value), area}), top(series): of the scale, which follows the data without it, up to most(series), extra(series): a figure below the chart. has(stats): false where the server has no such thing, and the chart is hidden. */
function definitions() {
  const rate = (value) => (Number.isNaN(value) ? "–" : `${count(value)}/s`);
  const level = (name) => (series, second) => series.at(name, second);
  const usedShare = (used, total) => (total ? `${percent(used / total)} of ${count(total)}` : "–");
  return [
    {
      id: "hits",
      title: "Hit rate",
      note: "last minute",
      spoken: "share of the prompts' tokens that were found",
      top: () => 1,
      scale: "100 %",
      lines: [{ words: "", colour: "line-1", value: (series, second) => series.hitRate(second), area: true }],
      figure: (series, second) => {
        const share = series.hitRate(second);
        return Number.isNaN(share) ? "–" : percent(share);
      },
    },
    {
      id: "kv",
      title: "KV cache",
      note: "on the device",
      spoken: "tokens on the device, by use",
      most: (series) => series.stats?.total ?? 1,
      stacked: true,
      lines: [
        { words: "locked", colour: "use-locked", value: level("locked"), text: count },
        { words: "private", colour: "use-private", value: level("private"), text: count },
        { words: "leased", colour: "lease", value: level("leased"), text: count },
        { words: "evictable", colour: "use-evictable", value: level("evictable"), text: count },
        { words: "free", colour: "use-free", value: level("free"), text: count, hollow: true },
      ],
      figure: ({ stats }) => (stats ? usedShare(stats.total - stats.free, stats.total) : "–"),
    },
    {
      id: "window",
      title: "Windows",
      note: "on the device",
      spoken: "tokens in the pool for sliding windows, by use",
      has: (stats) => stats.window_total > 0,
      most: (series) => series.stats?.window_total ?? 1,
      stacked: true,
      lines: [
        { words: "in use", colour: "use-locked", value: level("window_used"), text: count },
        { words: "evictable", colour: "use-evictable", value: level("window_evictable"), text: count },
        { words: "free", colour: "use-free", value: level("window_free"), text: count, hollow: true },
      ],
      figure: ({ stats }) => usedShare(stats.window_total - stats.window_free, stats.window_total),
      extra: ({ stats }) => `${count(stats.window_evicted)} evicted`,
    },
    {
      id: "states",
      title: "States",
      note: "on the device",
      spoken: "recurrent states on the device, by use",
      has: (stats) => stats.states_total > 0,
      most: (series) => series.stats?.states_total ?? 1,
      stacked: true,
      lines: [
        { words: "in use", colour: "use-locked", value: level("states_used"), text: count },
        { words: "kept", colour: "use-private", value: level("states_kept"), text: count },
        { words: "optional", colour: "use-evictable", value: level("states_optional"), text: count },
        { words: "free", colour: "use-free", value: level("states_free"), text: count, hollow: true },
      ],
      figure: ({ stats }) => usedShare(stats.states_total - stats.states_free, stats.states_total),
      extra: ({ stats }) => `${count(stats.states_evicted)} evicted`,
    },
    {
      id: "speed",
      title: "Throughput",
      note: "tokens per second",
      spoken: "tokens per second",
      lines: [
        { words: "prompt", colour: "line-1", value: (series, second) => series.rate("prompt_tokens", second), text: rate },
        { words: "output", colour: "line-2", value: (series, second) => series.rate("output_tokens", second), text: rate },
      ],
      figure: (series, second) => {
        const both = series.rate("prompt_tokens", second) + series.rate("output_tokens", second);
        return Number.isNaN(both) ? "–" : `${count(both)}/s`;
      },
    },
    {
      id: "evicted",
      title: "Evicted",
      note: "tokens per second",
      spoken: "tokens per second",
      lines: [{ words: "", colour: "line-3", value: (series, second) => series.rate("evicted", second), area: true }],
      figure: (series, second) => rate(series.rate("evicted", second)),
      extra: (series) => (series.stats ? `${tokens(series.stats.evicted)} in total` : ""),
    },
    {
      id: "host",
      title: "Host tier",
      note: "host memory",
      spoken: "tokens in host memory",
      has: (stats) => stats.host_total > 0,
      top: (series) => series.stats.host_total,
      lines: [{ words: "", colour: "use-host", value: level("host"), area: true }],
      figure: ({ stats }) => usedShare(stats.host_used, stats.host_total),
    },
    {
      id: "host-states",
      title: "Host states",
      note: "host memory",
      spoken: "recurrent states in host memory",
      has: (stats) => stats.host_states_total > 0,
      top: (series) => series.stats.host_states_total,
      lines: [{ words: "", colour: "use-host", value: level("host_states"), area: true }],
      figure: ({ stats }) => usedShare(stats.host_states_used, stats.host_states_total),
      extra: ({ stats }) => `${count(stats.host_states_evicted)} evicted`,
    },
  ];
}

export class Charts {
  #tiles;
  #series = null;

  constructor(container, { frames, theme }) {
    this.theme = theme;
    this.frames = frames;
    this.draw = frames.add(() => this.#draw());
    this.#tiles = definitions().map((definition) => new Tile(container, definition, () => frames.ask(this.draw)));
    theme.onChange(() => frames.ask(this.draw));
  }

  show(series) {
    this.#series = series;
    for (const { definition, figure } of this.#tiles) {
      figure.hidden = definition.has !== undefined && !(series.stats && definition.has(series.stats));
    }
    this.frames.ask(this.draw);
  }

  #draw() {
    if (this.#series === null) return;
    for (const tile of this.#tiles) if (!tile.figure.hidden) tile.paint(this.#series, this.theme);
  }
}

class Tile {
  #pointer = null;
  #top = 1;

  constructor(container, definition, redraw) {
    this.definition = definition;
    this.now = element("span", { class: "tile-now" });
    this.canvas = element("canvas", { role: "img", "aria-label": definition.title });
    this.keys = definition.lines
      .filter(({ words }) => words)
      .map((line) => {
        const value = element("span", { class: "number" });
        const swatch = element("i", { class: `swatch dot-${line.colour}` });
        return { line, value, item: element("li", {}, swatch, `${line.words} `, value) };
      });
    this.extra = element(this.keys.length ? "li" : "p", { class: this.keys.length ? "" : "tile-extra quiet" });
    const title = element("figcaption", {}, element("b", {}, definition.title), " ", element("span", { class: "quiet" }, definition.note));
    this.scale = element("li");
    const below = this.keys.length
      ? element("ul", { class: "tile-keys" }, ...this.keys.map(({ item }) => item), ...(definition.extra ? [this.extra] : []), this.scale)
      : this.extra;
    this.figure = element("figure", { class: "tile", id: `tile-${definition.id}` }, title, this.now, this.canvas, below);
    container.append(this.figure);
    new ResizeObserver(redraw).observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => {
      this.#pointer = event.offsetX;
      redraw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.#pointer = null;
      redraw();
    });
  }

  paint(series, theme) {
    const { definition } = this;
    const last = series.last ?? 0;
    const span = Math.max(SHORTEST_S, Math.min(SPAN_S - 1, last - (series.first ?? last)));
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    const pen = sized(this.canvas, width, height);
    const lines = definition.lines.map((line) => ({ line, values: sample(line, series, last, span, width) }));
    this.#top = definition.top?.(series) ?? Math.min(this.#calmTop(lines), definition.most?.(series) ?? Infinity);
    const plot = { pen, width, height, theme, top: this.#top };
    pen.fillStyle = theme.colour("grid");
    for (const share of [0, 0.5, 1]) pen.fillRect(0, Math.round((height - 1) * share), width, 1);
    if (definition.stacked) stack(plot, lines.filter(({ line }) => !line.hollow));
    else for (const { line, values } of lines) draw(plot, line, values);
    const at = this.#pointer === null ? last : Math.round(last - span * (1 - this.#pointer / Math.max(1, width)));
    if (this.#pointer !== null) {
      pen.fillStyle = theme.colour("ink-2");
      pen.fillRect(this.#pointer, 0, 1, height);
    }
    this.#write(series, at, last, span);
  }

  /** The scale of rates grows at once and shrinks only when it is far too large, so that lines do not jump about. */
  #calmTop(lines) {
    const drawn = lines.filter(({ line }) => !line.hollow).map(({ values }) => values);
    const heights = this.definition.stacked ? sums(drawn) : drawn.flat();
    const most = Math.max(1, ...heights.filter((value) => !Number.isNaN(value)));
    return most > this.#top || most < this.#top / 3 ? nice(most * 1.1) : this.#top;
  }

  #write(series, at, last, span) {
    const { definition } = this;
    const figure = definition.figure(series, at);
    setText(this.now, at === last ? figure : `${figure} · ${last - at} s ago`);
    for (const { line, value } of this.keys) {
      const number = line.value(series, at);
      setText(value, Number.isNaN(number) ? "–" : line.text(number));
    }
    const scale = definition.scale ?? "";
    const scaleWords = `scale to ${scale || count(this.#top)}`;
    setText(this.extra, definition.extra?.(series) || scaleWords);
    setText(this.scale, scaleWords);
    // Read out when focus arrives: the chart's subject, not each of its numbers as they change.
    const label = `${definition.title}, ${definition.spoken}, over the last ${plural(Math.round(span / 60), "minute")}`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
  }
}

/** A value for every second pixel. */
function sample(line, series, last, span, width) {
  const points = Math.max(2, Math.min(SPAN_S, Math.floor(width / 2)));
  return Array.from({ length: points }, (_, index) => line.value(series, Math.round(last - span * (1 - index / (points - 1)))));
}

function draw({ pen, width, height, theme, top }, line, values) {
  const x = (index) => (index / (values.length - 1)) * width;
  const y = (value) => height - 1 - Math.min(1, value / top) * (height - 2);
  pen.strokeStyle = theme.colour(line.colour);
  pen.fillStyle = pen.strokeStyle;
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  for (const [from, to] of runs(values)) {
    pen.beginPath();
    for (let index = from; index < to; index++) pen.lineTo(x(index), y(values[index]));
    pen.stroke();
    if (!line.area) continue;
    pen.lineTo(x(to - 1), height);
    pen.lineTo(x(from), height);
    pen.globalAlpha = 0.16;
    pen.fill();
    pen.globalAlpha = 1;
  }
}

/** At each point, of all lines; a gap in one counts as nothing. */
function sums(lines) {
  return lines[0].map((_, index) => lines.reduce((sum, values) => sum + (Number.isNaN(values[index]) ? 0 : values[index]), 0));
}

/** Areas on top of each other; the first lowest. */
function stack({ pen, width, height, theme, top }, lines) {
  const points = lines[0].values.length;
  const x = (index) => (index / (points - 1)) * width;
  const base = new Float64Array(points);
  for (const { line, values } of lines) {
    pen.fillStyle = theme.colour(line.colour);
    for (const [from, to] of runs(values)) {
      pen.beginPath();
      for (let index = from; index < to; index++) pen.lineTo(x(index), height - ((base[index] + values[index]) / top) * height);
      for (let index = to - 1; index >= from; index--) pen.lineTo(x(index), height - (base[index] / top) * height);
      pen.fill();
    }
    values.forEach((value, index) => (base[index] += Number.isNaN(value) ? 0 : value));
  }
}

/** [[from, to], …] of stretches without a gap. */
function runs(values) {
  const found = [];
  let from = null;
  for (let index = 0; index <= values.length; index++) {
    const there = index < values.length && !Number.isNaN(values[index]);
    if (there) from ??= index;
    else if (from !== null) {
      found.push([from, index]);
      from = null;
    }
  }
  return found;
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value);
}

function sized(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}
