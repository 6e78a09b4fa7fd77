/* The form that fills holes, continues and writes from nothing. */

import { $, ask, busy, capital, copied, events, problem } from "./common.js";
import { begin, last, pause, show, story } from "./story.js";

const HOLE = /<mask(?::(\d+))?>/g;

const mode = () => document.querySelector("[name=mode]:checked").value;

function showMode() {
  const filling = mode() === "fill", nothing = mode() === "nothing";
  $("text-field").hidden = nothing;
  $("hole-tools").hidden = !filling;
  $("length-field").hidden = filling;
  $("text-label").textContent = filling ? "Your text, with holes" : "Your text, to be continued";
  $("go").textContent = filling ? "Fill the holes" : nothing ? "Write" : "Continue";
}

function segments(template) {
  const pieces = [];
  let end = 0;
  for (const hole of template.matchAll(HOLE)) {
    if (hole.index > end) pieces.push(template.slice(end, hole.index));
    pieces.push(Number(hole[1] || 1));
    end = hole.index + hole[0].length;
  }
  if (end < template.length) pieces.push(template.slice(end));
  return pieces;
}

async function hideSelection() {
  const field = $("text"), start = field.selectionStart, end = field.selectionEnd;
  const chosen = field.value.slice(start, end);
  if (!chosen) {
    problem("write", "Select the words to hide first.");
    return;
  }
  problem("write", "");
  // Holes inside the selection count with their own lengths.
  let tokens = 0;
  for (const piece of segments(chosen)) {
    if (typeof piece === "number") tokens += piece;
    else tokens += (await (await ask("/v1/tokens", { text: piece })).json()).tokens.length;
  }
  const hole = `<mask:${Math.max(1, tokens)}>`;
  field.setRangeText(hole, start, end, "end");
  field.focus();
}

function request() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const wanted = { fill: () => segments($("text").value), continue: () => [$("text").value, number("length")].filter((piece) => piece !== ""), nothing: () => [number("length")] };
  return {
    segments: wanted[mode()](), n: number("n"), steps: number("steps"), sampler: $("sampler").value,
    temperature: number("temperature"), top_p: number("top-p"), seed: number("seed"),
  };
}

let writing = null;

async function write(event) {
  event.preventDefault();
  const body = request();
  if (!body.segments.some((piece) => typeof piece === "number")) {
    problem("write", "There is no hole yet: select some words and hide them.");
    return;
  }
  problem("write", "");
  pause();
  writing = new AbortController();
  busy("write", true);
  $("write-status").textContent = "waiting for a place…";
  try {
    const answer = await ask("/v1/infill", { ...body, alternatives: 6, stream: true }, writing.signal);
    for await (const { name, data } of events(answer)) {
      if (name === "canvas") {
        begin(data);
        $("curl").textContent = curl({ ...body, seed: data.seed });
      } else if (name === "step") {
        story.steps[data.index].push(data.changes);
        $("write-status").textContent = `step ${last()}`;
        if (story.following) show(last());
      } else if (name === "result") {
        story.results[data.index] = data;
        if (story.following) show(last());
      } else if (name === "error") {
        throw new Error(data.error.message);
      }
    }
    $("write-status").textContent = `done in ${last()} steps`;
  } catch (error) {
    $("write-status").textContent = "";
    if (error.name === "AbortError") $("write-status").textContent = "stopped";
    else problem("write", capital(error.message));
  } finally {
    busy("write", false);
    writing = null;
  }
}

function curl(body) {
  const text = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/infill -H 'Content-Type: application/json' -d '${text}'`;
}

export function setUpWriting() {
  const hide = () => hideSelection().catch((error) => problem("write", capital(error.message)));
  for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", showMode);
  $("text").value = "Select some of these words\nand turn them into holes.";
  $("text").addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "m" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      hide();
    }
  });
  $("make-hole").addEventListener("click", hide);
  $("write-form").addEventListener("submit", write);
  $("stop").addEventListener("click", () => writing && writing.abort());
  $("copy-curl").addEventListener("click", () => copied($("copy-curl"), $("curl").textContent));
  showMode();
}
