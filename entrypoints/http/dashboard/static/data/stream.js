// The server's events, read with fetch() so that the key travels in a header; EventSource could send none.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;
const SILENCE_MS = 40_000;
const MAX_EVENT_CHARS = 32 * 1024 * 1024;

/** The server refused: something has to be changed before another try makes sense. */
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class EventStream {
  #abort = null;
  #timer = null;
  #failures = 0;
  #run = 0;

  /**
   * handlers: event(name, data) for each event; state(name, detail) with the names connecting, live, waiting
   * (detail: {seconds, reason}), key (detail: {reason, tried}) and refused (detail: {reason}).
   */
  constructor(url, handlers) {
    this.url = url;
    this.handlers = handlers;
    this.key = null;
    addEventListener("online", () => this.#timer !== null && this.open());
  }

  /** Connect now, whatever was under way. */
  open() {
    this.close();
    const run = ++this.#run;
    this.handlers.state("connecting");
    this.#read(run).then(
      () => run === this.#run && this.#again("the server ended the stream"),
      (error) => run === this.#run && this.#failed(error),
    );
  }

  close() {
    this.#run++;
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#abort?.abort();
    this.#abort = null;
  }

  async #read(run) {
    const abort = (this.#abort = new AbortController());
    let silence = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const headers = { Accept: "text/event-stream" };
      if (this.key !== null) headers.Authorization = `Bearer ${this.key}`;
      const answer = await fetch(this.url, { headers, signal: abort.signal, cache: "no-store", redirect: "error" });
      if (!answer.ok) throw new Refused(answer.status, await reasonOf(answer));
      const parser = new EventParser((name, data) => {
        if (run !== this.#run) return;
        if (name === "hello") {
          this.#failures = 0;
          this.handlers.state("live");
        }
        try {
          this.handlers.event(name, data);
        } catch (error) {
          console.error(error);
          throw new RangeError(`an event ${name} that this page does not understand`);
        }
      });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done || run !== this.#run) return;
        clearTimeout(silence);
        silence = setTimeout(() => abort.abort(), SILENCE_MS);
        parser.feed(value);
      }
    } finally {
      clearTimeout(silence);
      abort.abort();
    }
  }

  #failed(error) {
    if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
      this.handlers.state("key", { reason: error.message, tried: this.key !== null });
    } else if (error instanceof Refused && error.status < 500 && error.status !== 408 && error.status !== 429) {
      this.handlers.state("refused", { reason: error.message });
    } else if (error instanceof Refused) {
      this.#again(error.message);
    } else if (error.name === "AbortError") {
      this.#again("the server has been silent");
    } else if (error instanceof SyntaxError || error instanceof RangeError) {
      this.#again("the server sent what this page cannot read");
    } else {
      this.#again("the server cannot be reached");
    }
  }

  #again(reason) {
    const longest = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.#failures);
    const wait = longest * (0.75 + 0.25 * Math.random());
    this.#failures = Math.min(this.#failures + 1, 10);
    this.#timer = setTimeout(() => this.open(), wait);
    this.handlers.state("waiting", { seconds: wait / 1000, reason });
  }
}

/** Server-sent events out of pieces of text, cut anywhere. Throws SyntaxError (data is no JSON), RangeError (endless). */
export class EventParser {
  #rest = [];
  #held = 0;
  #name = "message";
  #data = [];

  constructor(emit) {
    this.emit = emit;
  }

  feed(text) {
    let from = 0;
    for (;;) {
      const end = text.indexOf("\n", from);
      if (end < 0) break;
      this.#line(this.#rest.join("") + text.slice(from, end));
      this.#rest = [];
      from = end + 1;
    }
    if (from < text.length) this.#rest.push(text.slice(from));
    this.#held += text.length;
    if (this.#held > MAX_EVENT_CHARS) throw new RangeError("an event without an end");
  }

  #line(line) {
    if (line.endsWith("\r")) line = line.slice(0, -1);
    if (line === "") {
      if (this.#data.length) this.emit(this.#name, JSON.parse(this.#data.join("\n")));
      this.#name = "message";
      this.#data = [];
      this.#held = 0;
    } else if (line.startsWith("event:")) {
      this.#name = line.slice(6).trim();
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

/** The message of the server's own error, or the status. */
async function reasonOf(answer) {
  try {
    const body = await answer.json();
    const message = body.error?.message ?? body.message;
    if (typeof message === "string") return message.slice(0, 500);
  } catch {
    // Not JSON; perhaps a proxy's page.
  }
  return `the server answered ${answer.status}`;
}
