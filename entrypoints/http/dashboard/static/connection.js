// Shows the connection: its state, the form for the key, the reason of a failure.

import { byId, setText } from "./drawing/dom.js";
import { shortened, visible } from "./drawing/format.js";

const STORED = "baton-dashboard-key";
const HEADER_SAFE = /^[\x21-\x7e]+$/;

export class Connection {
  #until = null;
  #reason = "";
  #shown = "connecting";

  /** stream: an EventStream; announce(words): said aloud once. */
  constructor(announce) {
    this.announce = announce;
    this.stream = null;
    byId("retry").addEventListener("click", () => this.stream.open());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#useKey(byId("key").value.trim());
    });
  }

  attach(stream) {
    this.stream = stream;
    stream.key = stored();
  }

  #useKey(key) {
    if (!HEADER_SAFE.test(key)) {
      this.#say("A key consists of letters, digits and signs, without spaces; this one cannot be sent in a header.");
      return;
    }
    this.stream.key = key;
    store(key);
    this.stream.open();
  }

  #say(reason) {
    setText(byId("key-reason"), reason);
    byId("key-reason").setAttribute("role", "alert");
  }

  /** A state of the stream. */
  show(state, detail = {}) {
    this.#until = state === "waiting" ? performance.now() / 1000 + detail.seconds : null;
    this.#reason = detail.reason ?? "";
    // Trying again while it is down changes back and forth: that is one state to the reader.
    if (state === "connecting" && (this.#shown === "waiting" || this.#shown === "key")) return;
    const changed = state !== this.#shown;
    this.#shown = state;
    document.body.dataset.connection = state;
    byId("connection").dataset.state = state;
    byId("retry").hidden = state !== "waiting" && state !== "refused";
    this.#showKeyForm(state, detail);
    byId("trouble").hidden = state !== "refused";
    if (state === "refused") setText(byId("trouble-text"), shortened(visible(detail.reason), 500));
    this.tick();
    if (changed) this.announce(this.#words(false));
  }

  #showKeyForm(state, { reason, tried }) {
    const form = byId("key-form");
    const opened = form.hidden && state === "key";
    form.hidden = state !== "key";
    if (state === "live") byId("key").value = "";
    if (state !== "key") return;
    if (tried) {
      this.#say(`That key was not taken: ${shortened(visible(reason), 300)}`);
      store(null);
    }
    if (opened || tried) byId("key").focus();
  }

  /** Once a second: the time until the next try. */
  tick() {
    setText(byId("connection-text"), this.#words(true));
  }

  #words(exact) {
    if (this.#shown === "live") return "Live";
    if (this.#shown === "key") return "Needs a key";
    if (this.#shown === "refused") return "Refused";
    if (this.#shown === "connecting") return "Connecting";
    const left = this.#until === null ? 0 : Math.ceil(this.#until - performance.now() / 1000);
    const when = left > 0 && exact ? `again in ${left} s` : "trying again";
    return `Offline: ${this.#reason}, ${when}`;
  }
}

function stored() {
  try {
    return sessionStorage.getItem(STORED);
  } catch {
    return null;
  }
}

function store(key) {
  try {
    if (key === null) sessionStorage.removeItem(STORED);
    else sessionStorage.setItem(STORED, key);
  } catch {
    // Storage is turned off: the key lasts as long as the page.
  }
}
