// Shown while there is no data: how to send the first requests.

import { element } from "./drawing/dom.js";

const TURN = "<|im_start|>user\\nHow many lines are in manual.md?<|im_end|>\\n<|im_start|>assistant\\n";

/** A command, with a button that copies it. */
function command(text) {
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy it";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return element("div", { class: "command" }, element("pre", { tabindex: "0" }, element("code", {}, text)), button);
}

function curl(body, keyed) {
  const key = keyed ? " \\\n  -H \"Authorization: Bearer $KEY\"" : "";
  const url = new URL("../generate", import.meta.url);
  return `curl -s ${url} -H 'Content-Type: application/json'${key} -d '${body}'`;
}

/** keyed: true if this server requires keys. */
export function showFirstSteps(target, keyed) {
  target.replaceChildren(
    element("h3", {}, "Nothing is cached yet"),
    element("p", {}, "Send a request, and its tokens appear here as a span of the tree:"),
    command(curl(`{"rid": "one", "retain_ttl": 30, "text": "${TURN}"}`, keyed)),
    element("p", {}, "Within 30 seconds, continue it: its KV is handed off to the new request, and the timeline shows it."),
    command(curl('{"rid": "two", "continuation_of": "one", "continuation_suffix": " And then?"}', keyed)),
  );
}

export function showNoCache(target) {
  target.replaceChildren(
    element("h3", {}, "The radix cache is off"),
    element("p", {}, "This server was started with --disable-radix-cache, so there is no tree. Requests are shown below."),
  );
}
