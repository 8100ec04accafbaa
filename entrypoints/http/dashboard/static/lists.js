// Tables of the current state: the batch, the queue, leases, jobs. At most 100 rows each, as the server sends them.

import { element, KeyedChildren, setText, uniqueKeys } from "./drawing/dom.js";
import { count, countdown, duration, exact, shortened, visible } from "./drawing/format.js";

const PHASES = { prefill: "prefill", decode: "decode", beam: "beams", queued: "queued", loading: "loading", parent: "for its parent" };

/** One table with a heading that counts, and a line for when it is empty. */
export class ListTable {
  /** columns: [[title, class], …]; fill(cells, value): writes a row. */
  constructor(container, title, columns, fill) {
    this.number = element("span", { class: "number" });
    this.heading = element("h3", {}, `${title} `, this.number);
    this.none = element("p", { class: "quiet none" });
    this.body = element("tbody");
    const head = element("tr", {}, ...columns.map(([words, kind]) => element("th", { scope: "col", class: kind }, words)));
    this.table = element("table", {}, element("caption", { class: "unseen" }, title), element("thead", {}, head), this.body);
    this.more = element("p", { class: "quiet none" });
    container.append(this.heading, this.none, this.table, this.more);
    this.rows = new KeyedChildren(
      this.body,
      () => element("tr", {}, ...columns.map(([, kind], index) => element(index ? "td" : "th", { class: kind, scope: index ? null : "row" }))),
      (row, value) => fill(row.children, value),
    );
  }

  show(items, total, nothing) {
    setText(this.number, exact(total));
    this.table.hidden = items.length === 0;
    this.none.hidden = items.length > 0;
    setText(this.none, nothing);
    this.more.hidden = total <= items.length;
    setText(this.more, `and ${count(total - items.length)} more`);
    this.rows.show(items);
  }
}

export function name(cell, text, job) {
  const shown = shortened(visible(text), 80);
  // Most name their requests after their jobs, or the other way round: then one name is enough.
  const named = job ? !job.includes(text) && !text.includes(job) : false;
  if (cell.dataset.text !== `${named} ${shown}`) {
    cell.dataset.text = `${named} ${shown}`;
    cell.replaceChildren(element("bdi", {}, shown));
    if (named) cell.append(element("bdi", { class: "job" }, shortened(visible(job), 40)));
  }
}

function phase(cell, kind, words) {
  setText(cell, words);
  cell.dataset.kind = kind;
}

/** A bar of ``share`` (0 to 1) under ``words``. */
function bar(cell, share, words, kind) {
  let [label, track] = cell.children;
  if (label === undefined) {
    label = element("span");
    track = element("span", { class: "track", "aria-hidden": "true" }, element("i"));
    cell.append(label, track);
  }
  setText(label, words);
  track.dataset.kind = kind;
  track.firstElementChild.style.width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
}

export class BatchLists {
  constructor(container) {
    this.running = new ListTable(
      container,
      "Running",
      [["Request", "name"], ["Phase", "phase"], ["Computed", "bar"], ["Output", "number-cell"]],
      (cells, request) => {
        name(cells[0], request.rid, request.job_id);
        phase(cells[1], request.phase, PHASES[request.phase] ?? visible(request.phase));
        const share = request.total > 0 ? request.computed / request.total : 0;
        const whole = request.phase === "prefill" ? ` / ${count(request.total)}` : "";
        bar(cells[2], share, `${count(request.computed)}${whole}`, request.phase);
        setText(cells[3], count(request.output));
      },
    );
    this.waiting = new ListTable(
      container,
      "Waiting",
      [["Request", "name"], ["For", "phase"], ["Tokens", "number-cell"], ["Waited", "number-cell"]],
      (cells, request) => {
        name(cells[0], request.rid, request.job_id);
        phase(cells[1], request.phase, PHASES[request.phase] ?? visible(request.phase));
        setText(cells[2], count(request.total));
        setText(cells[3], duration(request.waited));
      },
    );
  }

  show(update) {
    const { stats } = update;
    this.running.show(uniqueKeys(update.running, (each) => each.rid), stats.running, "Nothing is computed at the moment.");
    this.waiting.show(uniqueKeys(update.waiting, (each) => each.rid), stats.waiting, "No request is waiting.");
  }

  clear() {
    this.running.show([], 0, "Nothing is computed at the moment.");
    this.waiting.show([], 0, "No request is waiting.");
  }
}

export class HeldLists {
  #whole = new Map();
  #update = null;

  constructor(container) {
    this.now = 0;
    this.leases = new ListTable(
      container,
      "Leases",
      [["Of request", "name"], ["Tokens", "number-cell"], ["Ends in", "bar"]],
      (cells, lease) => {
        name(cells[0], lease.rid ?? "a request without a name", lease.job_id);
        setText(cells[1], count(lease.tokens));
        this.#deadline(cells[2], `lease ${lease.serial}`, lease.expires_in, lease.claimed ? "claimed" : "–");
      },
    );
    this.jobs = new ListTable(
      container,
      "Jobs",
      [["Job", "name"], ["State", "phase"], ["Steps", "number-cell"], ["Pinned", "number-cell"], ["Ends in", "bar"]],
      (cells, job) => {
        name(cells[0], job.job_id);
        phase(cells[1], job.state, visible(job.state));
        setText(cells[2], count(job.steps));
        setText(cells[3], count(job.pinned));
        this.#deadline(cells[4], `job ${job.job_id}`, job.expires_in, "–");
      },
    );
    this.clear();
  }

  #deadline(cell, key, expiresIn, otherwise) {
    if (expiresIn === null) {
      bar(cell, 0, otherwise, "none");
      return;
    }
    const left = Math.max(0, this.#update.t + expiresIn - this.now);
    // The whole length of the deadline is not sent: the longest rest seen stands for it.
    const whole = Math.max(this.#whole.get(key) ?? 0, expiresIn);
    this.#whole.set(key, whole);
    bar(cell, whole > 0 ? left / whole : 0, countdown(left), left < 5 ? "soon" : "lease");
  }

  /** now: of the server; called once a second, too, for what counts down. */
  show(update, now) {
    this.#update = update;
    this.now = now;
    const leases = update.leases.map((lease) => [`lease ${lease.serial}`, lease]);
    const jobs = uniqueKeys(update.jobs, (job) => `job ${job.job_id}`);
    this.leases.show(leases, update.num_leases, "No lease. A request with retain_ttl keeps its KV for the one that continues it.");
    this.jobs.show(jobs, update.num_jobs, "No job. Requests of one agent name it in job_id.");
    const present = new Set([...leases, ...jobs].map(([key]) => key));
    for (const key of this.#whole.keys()) if (!present.has(key)) this.#whole.delete(key);
  }

  clear() {
    this.#whole.clear();
    this.show({ t: 0, leases: [], jobs: [], num_leases: 0, num_jobs: 0 }, 0);
  }
}

