// The server's time, as it passes between its messages.

const LONGEST_SILENCE_S = 7;

export class Clock {
  #offset = null;
  #last = 0;
  #frozen = null;

  /** A message of server time ``t`` (seconds) has come in. */
  heard(t) {
    const offset = t - performance.now() / 1000;
    // The quickest message shows the clock best; slower ones pull it back by little, so that nothing jumps.
    if (this.#offset === null || offset > this.#offset || this.#offset - offset > 2) this.#offset = offset;
    else this.#offset += 0.1 * (offset - this.#offset);
    this.#last = t;
  }

  /** Seconds since the worker's start. It stops soon without messages, so that no countdown runs unconfirmed. */
  now() {
    if (this.#frozen !== null) return this.#frozen;
    if (this.#offset === null) return 0;
    return Math.max(this.#last, Math.min(performance.now() / 1000 + this.#offset, this.#last + LONGEST_SILENCE_S));
  }

  freeze(frozen) {
    this.#frozen = frozen ? this.now() : null;
  }

  reset() {
    this.#offset = null;
    this.#last = 0;
    this.#frozen = null;
  }
}
