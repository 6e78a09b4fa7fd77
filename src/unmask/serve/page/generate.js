/* The form that fills holes, continues a text or generates one from nothing. */

import { $, bringIntoView, copyToClipboard, insertText } from "./common.js";
import { callApi, events, UserError, model, tooLong, withModel } from "./api.js";
import { Constraint } from "./constraint.js";
import { readNumber, showError } from "./form.js";
import { Options, setDefault } from "./options.js";
import { address, keep, keepField, saveState } from "./state.js";
import { showPrevious, startPlayback, focusToken, lastStep, onTokenFixed, pause, show, playback } from "./playback.js";

const HOLE = /<mask(?::(\d+))?>/g;
const MALFORMED_HOLE = /<\s*mask|\[mask|_{3}/i;

const mode = () => document.querySelector("[name=mode]:checked").value;
let options, constraint;

function showMode() {
  const filling = mode() === "fill", nothing = mode() === "nothing";
  $("text-field").hidden = nothing;
  $("hole-tools").hidden = !filling;
  $("length-field").hidden = filling;
  $("length").disabled = filling;
  $("text-label").textContent = filling ? "Your text, with holes" : "Your text, to be continued";
  $("go").textContent = filling ? "Fill the holes" : nothing ? "Write" : "Continue";
  const example = shownExample();
  if (example) setText(example, true);
  showHoles();
}

/* What patterns are for: the holes of the text, or what is written after it. */
function showHoles() {
  constraint.showHoles(mode() === "fill" ? ($("text").value.match(HOLE) ?? []) : [""]);
  const count = options.countFurther() + (constraint.kind === "any" ? 0 : 1);
  $("more-count").textContent = count ? ` (${count} set)` : "";
}

const visiblePrefix = (example) => example.template.split("<mask")[0];

/* The example that is in the field, if it is one. */
export const shownExample = () => model.examples?.find((each) => [each.template, visiblePrefix(each)].includes($("text").value));

/* Put an example into the field; with `replace`, also over text that is there. */
export function setText(example, replace) {
  const text = mode() === "fill" ? example.template : visiblePrefix(example);
  if (replace && !$("text-field").hidden) {
    const before = document.activeElement;
    insertText($("text"), 0, $("text").value.length, text);
    before.focus({ preventScroll: true }); // a phone would show its keyboard, a radio button lose its arrow keys
  } else if (replace || !$("text").value) {
    $("text").value = text;
  }
  showError("write");
  showHoles();
}

function segments(template) {
  const pieces = [];
  let end = 0;
  for (const hole of template.matchAll(HOLE)) {
    if (hole.index > end) pieces.push(template.slice(end, hole.index));
    if (Number(hole[1] ?? 1) < 1) throw new UserError(`A hole hides at least one token: make ${hole[0]} a <mask:1>, or delete it.`);
    pieces.push(Number(hole[1] ?? 1));
    end = hole.index + hole[0].length;
  }
  if (end < template.length) pieces.push(template.slice(end));
  return pieces;
}

async function hideSelection() {
  const field = $("text"), start = field.selectionStart, end = field.selectionEnd;
  const before = field.value, chosen = before.slice(start, end);
  if (!chosen) throw new UserError("Select the words to hide first.");
  showError("write");
  // Holes inside the selection count with their own lengths.
  let tokens = 0;
  for (const piece of segments(chosen)) {
    if (typeof piece === "number") tokens += piece;
    else tokens += (await (await callApi("/v1/tokenize", { text: piece })).json()).tokens.length;
  }
  if (field.value === before) insertText(field, start, end, `<mask:${Math.max(1, tokens)}>`);
}

function requestedSegments() {
  if (mode() === "nothing") return [readNumber($("length"))];
  const text = $("text").value, pieces = segments(text);
  if (mode() === "continue") return [...pieces, readNumber($("length"))];
  if (!text.trim()) throw new UserError("There is no text yet: type one, or take an example.");
  if (!pieces.some((piece) => typeof piece === "number")) {
    const hint = MALFORMED_HOLE.test(text) ? "a hole of four tokens is written <mask:4>" : "select some words and hide them";
    throw new UserError(`There is no hole yet: ${hint}.`);
  }
  return pieces;
}

function request() {
  const pieces = requestedSegments();
  if (pieces.reduce((sum, piece) => sum + (typeof piece === "number" ? piece : 0), 0) > model.max_length) throw new UserError(tooLong());
  return { segments: pieces, ...options.read(), ...constraint.read() };
}

/* The segments of a request, with the fixed tokens taken out of its holes. */
function withFixed(pieces, positions, fixed) {
  const openSegments = [];
  let next = 0;
  for (const piece of pieces) {
    if (typeof piece !== "number") {
      openSegments.push(piece);
      continue;
    }
    for (const position of positions.slice(next, next + piece)) {
      const before = openSegments.at(-1), open = typeof before === "number" && position !== positions[next];
      if (fixed.has(position)) openSegments.push([fixed.get(position).id]);
      else if (open) openSegments[openSegments.length - 1] = before + 1;
      else openSegments.push(1);
    }
    next += piece;
  }
  return openSegments;
}

let activeRequest = null;

function setBusy(on) {
  $("go").disabled = $("back").disabled = on;
  $("stop").hidden = !on;
}

async function run(body, fixed = new Map(), focus = null) {
  showError("write");
  pause();
  saveState();
  if (activeRequest) activeRequest.abort();
  const controller = activeRequest = new AbortController();
  setBusy(true);
  const setStatus = (text) => { playback.status = $("write-status").textContent = text; };
  $("write-status").textContent = "waiting in the queue…";
  try {
    const openSegments = fixed.size ? withFixed(body.segments, playback.positions, fixed) : body.segments;
    if (!openSegments.some((piece) => typeof piece === "number")) {
      startPlayback({ tokens: playback.given.map((token, position) => fixed.get(position) ?? token), n: 1, seed: body.seed }, body, fixed);
      focusToken(focus.index, focus.position);
      setStatus("every token is fixed");
      return;
    }
    const response = await callApi("/v1/infill", { ...body, segments: openSegments, alternatives: 6, stream: true }, controller.signal);
    let complete = false;
    for await (const { name, data } of events(response)) {
      if (name === "canvas") {
        startPlayback(data, { ...body, seed: data.seed }, fixed);
        $("curl").textContent = playback.command = curl({ ...body, segments: openSegments, seed: data.seed });
        if (focus) focusToken(focus.index, focus.position);
        else bringIntoView($("written"));
      } else if (name === "step") {
        playback.steps[data.index].push(data.changes);
        setStatus(`step ${lastStep()}`);
        if (playback.following) show(lastStep());
      } else if (name === "result") {
        playback.results[data.index] = data;
        if (playback.following) show(lastStep());
      } else if (name === "response") {
        complete = true;
      }
    }
    if (!complete) throw new UserError("The server stopped before the text was finished: try again.");
    setStatus(doneMessage(lastStep(), body.steps));
  } catch (error) {
    if (activeRequest !== controller) return;
    if (error.name === "AbortError") return setStatus("stopped");
    $("write-status").textContent = "";
    showError("write", error);
  } finally {
    if (activeRequest === controller) {
      setBusy(false);
      activeRequest = null;
    }
  }
}

function doneMessage(taken, requested) {
  if (requested && taken < requested) return `done in ${taken} of ${requested} steps: in the others there was nothing to write`;
  return `done in ${taken === 1 ? "1 step" : `${taken} steps`}`;
}

/* Fix a token at a position (null: the model chooses again) and generate all others again. */
onTokenFixed((index, position, token) => {
  const fixed = new Map(playback.fixed);
  if (token) fixed.set(position, token);
  else fixed.delete(position);
  run(playback.body, fixed, { index, position });
});

function submit(event) {
  event.preventDefault();
  try {
    run(request());
  } catch (error) {
    showError("write", error);
  }
}

function curl(body) {
  const text = JSON.stringify(withModel(body)).replaceAll("'", "'\\''");
  return `curl ${location.origin}/v1/infill -H 'Content-Type: application/json' -d '${text}'`;
}

/* A link to the text that is shown, so it includes the seed. */
function copyLink() {
  const { url, fits } = address(playback.body && !$("seed").value ? { seed: playback.body.seed } : {});
  copyToClipboard($("copy-link"), url, fits ? "Copied" : "Copied, without the text: it is too long");
}

/* What the chosen model allows: the length of what is written, and its options. */
function showModel() {
  options.showModel();
  const length = model.max_length >= 256 ? 48 : Math.max(1, Math.min(16, Math.floor(model.max_length / 3)));
  $("length").max = Math.min(model.max_length, model.limits.max_tokens);
  setDefault($("length"), String(Math.min(length, $("length").max)));
  showHoles();
}

/* Set the form up; returns what follows the chosen model, and the API's description. */
export function setUpGenerating() {
  const modes = [...document.querySelectorAll("[name=mode]")];
  keep("mode", { read: mode, write: (value) => modes.find((each) => each.value === value)?.click(), initial: () => "fill" });
  keepField("text", true);
  keepField("length");
  options = new Options("");
  constraint = new Constraint("", "What is written");
  const hide = () => hideSelection().catch((error) => showError("write", error));
  for (const radio of modes) radio.addEventListener("change", showMode);
  $("text").addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "m" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      hide();
    }
  });
  $("make-hole").addEventListener("click", hide);
  $("write-form").addEventListener("submit", submit);
  for (const kind of ["input", "change"]) $("write-form").addEventListener(kind, showHoles);
  $("stop").addEventListener("click", () => activeRequest && activeRequest.abort());
  $("back").addEventListener("click", showPrevious);
  $("copy-link").addEventListener("click", copyLink);
  $("copy-curl").addEventListener("click", () => copyToClipboard($("copy-curl"), $("curl").textContent));
  showMode();
  const describe = ({ InfillRequest }) => { options.describe(InfillRequest); constraint.describe(); };
  return { showModel, describe };
}
