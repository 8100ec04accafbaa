// Numbers over the last ten minutes: one slot a second, in rings of fixed size.

export const SPAN_S = 600;
const HIT_WINDOW_S = 60;

const KV_LEVELS = ["locked", "private", "leased", "evictable", "quarantined", "free"];
const OTHER_LEVELS = ["host", "states_used", "states_kept", "states_optional", "states_free", "host_states", "window_used", "window_evictable", "window_free"];
const TOTALS = ["queries", "hits", "evicted", "prompt_tokens", "output_tokens"];

export class Series {
  constructor() {
    this.rings = new Map([...KV_LEVELS, ...OTHER_LEVELS, ...TOTALS].map((name) => [name, new Float64Array(SPAN_S)]));
    this.clear();
  }

  clear() {
    for (const ring of this.rings.values()) ring.fill(NaN);
    this.first = null;
    this.last = null;
    this.stats = null;
  }

  /** stats: of an update at server time t. Seconds without an update get what lies between the two around them. */
  add(t, stats) {
    const second = Math.floor(t);
    const values = { ...levels(stats), ...otherLevels(stats), ...pick(stats, TOTALS) };
    if (this.last === null || second < this.last || second - this.last > SPAN_S) {
      this.clear();
      this.first = second;
    } else {
      this.#fillBetween(second, values);
    }
    for (const [name, value] of Object.entries(values)) this.rings.get(name)[second % SPAN_S] = value;
    this.last = second;
    this.stats = stats;
  }

  #fillBetween(second, values) {
    const gap = second - this.last;
    for (const [name, value] of Object.entries(values)) {
      const ring = this.rings.get(name);
      const before = ring[this.last % SPAN_S];
      for (let step = 1; step < gap; step++) {
        const level = TOTALS.includes(name) ? before + ((value - before) * step) / gap : before;
        ring[(this.last + step) % SPAN_S] = level;
      }
    }
  }

  /** The value at a second of server time; NaN where there is none (any more). */
  at(name, second) {
    if (this.last === null || second > this.last || second < this.first || second <= this.last - SPAN_S) return NaN;
    return this.rings.get(name)[((second % SPAN_S) + SPAN_S) % SPAN_S];
  }

  /** Growth per second over the ``window`` seconds before; fewer at the beginning. */
  rate(name, second, window = 4) {
    const from = Math.max(second - window, this.first ?? second, (this.last ?? 0) - SPAN_S + 1);
    const grown = this.at(name, second) - this.at(name, from);
    return second > from ? Math.max(0, grown) / (second - from) : NaN;
  }

  /** Share of the prompts' tokens that were found, over the last minute; NaN where there were no prompts. */
  hitRate(second) {
    const asked = this.rate("queries", second, HIT_WINDOW_S);
    return asked > 0 ? this.rate("hits", second, HIT_WINDOW_S) / asked : NaN;
  }
}

/** Use of the KV pool's slots, each counted once. Leased slots are locked, except for partial pages. */
export function levels(stats) {
  const held = stats.protected + stats.private;
  const leased = Math.min(stats.leased, held);
  const locked = Math.max(0, stats.protected - leased);
  return {
    locked,
    leased,
    private: held - leased - locked,
    evictable: stats.evictable,
    quarantined: stats.quarantined,
    free: stats.free,
  };
}

/** Use of the other pools. A state that a request names and the cache has as well counts as cached. */
export function otherLevels(stats) {
  return {
    host: stats.host_used,
    states_used: stats.states_held - stats.states_cached,
    states_kept: stats.states_kept,
    states_optional: stats.states_cached - stats.states_kept,
    states_free: stats.states_free,
    host_states: stats.host_states_used,
    window_used: stats.window_total - stats.window_free - stats.window_evictable,
    window_evictable: stats.window_evictable,
    window_free: stats.window_free,
  };
}

function pick(from, names) {
  return Object.fromEntries(names.map((name) => [name, from[name]]));
}
