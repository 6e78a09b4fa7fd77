/* The form that fills holes, continues and writes from nothing. */

import { $, bringIntoView, copied, problem, typed } from "./common.js";
import { ask, events, Fault, model, number, tooLong } from "./server.js";
import { address, keep } from "./state.js";
import { back, begin, focusToken, last, onFix, pause, show, story } from "./story.js";

const HOLE = /<mask(?::(\d+))?>/g;
const LIKE_A_HOLE = /<\s*mask|\[mask|_{3}/i;

const mode = () => document.querySelector("[name=mode]:checked").value;

function showMode() {
  const filling = mode() === "fill", nothing = mode() === "nothing";
  $("text-field").hidden = nothing;
  $("hole-tools").hidden = !filling;
  $("length-field").hidden = filling;
  $("length").disabled = filling;
  $("text-label").textContent = filling ? "Your text, with holes" : "Your text, to be continued";
  $("go").textContent = filling ? "Fill the holes" : nothing ? "Write" : "Continue";
  const shown = $("text").value, wanted = model.examples?.find((each) => shown === each.template || shown === beginning(each));
  if (wanted) setText(wanted, true);
}

const beginning = (example) => example.template.split("<mask")[0];

/* An example into the field: wherever there is nothing yet, or because somebody asked for it. */
export function setText(example, asked) {
  const text = mode() === "fill" ? example.template : beginning(example);
  if (asked && !$("text-field").hidden) {
    const before = document.activeElement;
    typed($("text"), 0, $("text").value.length, text);
    before.focus({ preventScroll: true }); // a phone would show its keyboard, a radio button lose its arrow keys
  } else if (asked || !$("text").value) {
    $("text").value = text;
  }
  problem("write", "");
}

function segments(template) {
  const pieces = [];
  let end = 0;
  for (const hole of template.matchAll(HOLE)) {
    if (hole.index > end) pieces.push(template.slice(end, hole.index));
    if (Number(hole[1] ?? 1) < 1) throw new Fault(`A hole hides at least one token: make ${hole[0]} a <mask:1>, or delete it.`);
    pieces.push(Number(hole[1] ?? 1));
    end = hole.index + hole[0].length;
  }
  if (end < template.length) pieces.push(template.slice(end));
  return pieces;
}

async function hideSelection() {
  const field = $("text"), start = field.selectionStart, end = field.selectionEnd;
  const whole = field.value, chosen = whole.slice(start, end);
  if (!chosen) throw new Fault("Select the words to hide first.");
  problem("write", "");
  // Holes inside the selection count with their own lengths.
  let tokens = 0;
  for (const piece of segments(chosen)) {
    if (typeof piece === "number") tokens += piece;
    else tokens += (await (await ask("/v1/tokenize", { text: piece })).json()).tokens.length;
  }
  if (field.value === whole) typed(field, start, end, `<mask:${Math.max(1, tokens)}>`);
}

function wanted() {
  if (mode() === "nothing") return [number($("length"))];
  const text = $("text").value, pieces = segments(text);
  if (mode() === "continue") return [...pieces, number($("length"))];
  if (!text.trim()) throw new Fault("There is no text yet: type one, or take an example.");
  if (!pieces.some((piece) => typeof piece === "number")) {
    const hint = LIKE_A_HOLE.test(text) ? "a hole of four tokens is written <mask:4>" : "select some words and hide them";
    throw new Fault(`There is no hole yet: ${hint}.`);
  }
  return pieces;
}

function request() {
  const pieces = wanted();
  if (pieces.reduce((sum, piece) => sum + (typeof piece === "number" ? piece : 0), 0) > model.max_length) throw new Fault(tooLong());
  return {
    segments: pieces, n: number($("n")), steps: number($("steps")), sampler: $("sampler").value,
    temperature: number($("temperature")), top_p: number($("top-p")), seed: number($("seed")),
  };
}

/* The holes of a request, without the places where somebody has fixed a token. */
function withFixed(pieces, places, fixed) {
  const cut = [];
  let next = 0;
  for (const piece of pieces) {
    if (typeof piece !== "number") {
      cut.push(piece);
      continue;
    }
    for (const place of places.slice(next, next + piece)) {
      const before = cut.at(-1), open = typeof before === "number" && place !== places[next];
      if (fixed.has(place)) cut.push([fixed.get(place).id]);
      else if (open) cut[cut.length - 1] = before + 1;
      else cut.push(1);
    }
    next += piece;
  }
  return cut;
}

let writing = null;

function busy(on) {
  $("go").disabled = $("back").disabled = on;
  $("stop").hidden = !on;
}

async function run(body, fixed = new Map(), focus = null) {
  problem("write", "");
  pause();
  keep();
  if (writing) writing.abort();
  const mine = writing = new AbortController();
  busy(true);
  const tell = (text) => { story.status = $("write-status").textContent = text; };
  $("write-status").textContent = "waiting for a place…";
  try {
    const cut = fixed.size ? withFixed(body.segments, story.places, fixed) : body.segments;
    if (!cut.some((piece) => typeof piece === "number")) {
      begin({ tokens: story.given.map((token, place) => fixed.get(place) ?? token), n: 1, seed: body.seed }, body, fixed);
      focusToken(focus.index, focus.place);
      tell("every token is fixed");
      return;
    }
    const answer = await ask("/v1/infill", { ...body, segments: cut, alternatives: 6, stream: true }, mine.signal);
    let whole = false;
    for await (const { name, data } of events(answer)) {
      if (name === "canvas") {
        begin(data, { ...body, seed: data.seed }, fixed);
        $("curl").textContent = story.command = curl({ ...body, segments: cut, seed: data.seed });
        if (focus) focusToken(focus.index, focus.place);
        else bringIntoView($("written"));
      } else if (name === "step") {
        story.steps[data.index].push(data.changes);
        tell(`step ${last()}`);
        if (story.following) show(last());
      } else if (name === "result") {
        story.results[data.index] = data;
        if (story.following) show(last());
      } else if (name === "response") {
        whole = true;
      }
    }
    if (!whole) throw new Fault("The server stopped before the text was finished: try again.");
    tell(done(last(), body.steps));
  } catch (error) {
    if (writing !== mine) return;
    if (error.name === "AbortError") tell("stopped");
    else problem("write", error.message);
    if (error.name !== "AbortError") $("write-status").textContent = "";
  } finally {
    if (writing === mine) {
      busy(false);
      writing = null;
    }
  }
}

function done(taken, asked) {
  if (asked && taken < asked) return `done in ${taken} of ${asked} steps: in the others there was nothing to write`;
  return `done in ${taken === 1 ? "1 step" : `${taken} steps`}`;
}

/* A token that somebody wants at a place (null: the model shall choose again); all else is written anew. */
onFix((index, place, token) => {
  const fixed = new Map(story.fixed);
  if (token) fixed.set(place, token);
  else fixed.delete(place);
  run(story.body, fixed, { index, place });
});

function write(event) {
  event.preventDefault();
  try {
    run(request());
  } catch (error) {
    problem("write", error.message);
  }
}

function curl(body) {
  const text = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/infill -H 'Content-Type: application/json' -d '${text}'`;
}

/* A link to the text that is shown, not to any other that the same settings might give. */
function copyLink() {
  const { url, fits } = address(story.body && !$("seed").value ? { seed: story.body.seed } : {});
  copied($("copy-link"), url, fits ? "Copied" : "Copied, without the text: it is too long");
}

export function setUpWriting() {
  const hide = () => hideSelection().catch((error) => problem("write", error.message));
  for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", showMode);
  $("text").addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "m" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      hide();
    }
  });
  $("make-hole").addEventListener("click", hide);
  $("write-form").addEventListener("submit", write);
  $("stop").addEventListener("click", () => writing && writing.abort());
  $("back").addEventListener("click", back);
  $("copy-link").addEventListener("click", copyLink);
  $("copy-curl").addEventListener("click", () => copied($("copy-curl"), $("curl").textContent));
  showMode();
}
