/* The form that scores a text. */

import { $, bringIntoView, make, svg, insertText, visible } from "./common.js";
import { callApi, model, UserError } from "./api.js";
import { readNumber, showError } from "./form.js";
import { keepField, saveState } from "./state.js";
import { moveFocus } from "./playback.js";

/* Put an example into the field; with `replace`, also over text that is there. */
export function setScoreText(example, replace) {
  const field = $("score-text"), before = document.activeElement;
  if (!replace) { // shown as long as the field is untouched
    field.defaultValue = example.text;
    return;
  }
  insertText(field, 0, field.value.length, example.text);
  before.focus({ preventScroll: true });
  showError("score");
}

function scoreRequest() {
  const text = $("score-text").value;
  if (!text) throw new UserError("There is no text to score yet: type or paste one.", { field: $("score-text") });
  return { text, draws: readNumber($("draws")) };
}

async function score(event) {
  event.preventDefault();
  showError("score");
  saveState();
  $("score-go").disabled = true;
  try {
    const body = scoreRequest();
    $("score-status").textContent = "scoring…";
    showScore(await (await callApi("/v1/score", body)).json());
    bringIntoView($("scored"));
  } catch (error) {
    showError("score", error);
  } finally {
    $("score-status").textContent = "";
    $("score-go").disabled = false;
  }
}

function showScore(result) {
  const figures = [
    ["nats per token", result.nats_per_token, result.standard_error],
    ["perplexity", result.perplexity, result.perplexity_error],
    ["bits per byte", result.bits_per_byte, result.bits_per_byte_error],
  ];
  $("figures").replaceChildren(...figures.map(([name, value, error]) => {
    const box = make("div");
    const shown = make("dd", "", value.toPrecision(4));
    if (!result.exact) shown.append(" ", make("small", "", `± ${error.toPrecision(2)}`));
    box.append(make("dt", "", result.exact ? name : `${name}, at most`), shown);
    return box;
  }));
  $("surprise").replaceChildren(...result.tokens.map((token) => {
    const level = [0.5, 1.5, 3, 4.5, 6, 8].filter((edge) => token.nats >= edge).length;
    const element = make("span", `token s${level}`, token.text);
    element.tabIndex = -1;
    const showNats = () => { $("surprise-detail").textContent = `${visible(token.text)} · ${token.nats.toFixed(2)} nats`; };
    element.addEventListener("click", showNats);
    element.addEventListener("mouseenter", showNats);
    element.addEventListener("focus", showNats);
    element.dataset.written = "";
    return element;
  }));
  const first = $("surprise").querySelector(".token");
  if (first) first.tabIndex = 0;
  $("surprise-detail").textContent = "";
  plot(result.by_time);
  $("scored").hidden = false;
}

function plot(parts) {
  const width = 640, height = 220, left = 44, bottom = 30, top = 10;
  const maxNats = Math.max(1e-9, ...parts.map((part) => part.nats_per_token + part.standard_error));
  const y = (value) => top + (height - top - bottom) * (1 - Math.max(0, value) / maxNats);
  const x = (time) => left + (width - left - 8) * time;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Nats per token from each part of the time" });
  for (const tick of [0, maxNats / 2, maxNats]) {
    drawing.append(svg("line", { class: "axis", x1: left, x2: width - 8, y1: y(tick), y2: y(tick) }));
    drawing.append(svg("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, tick.toPrecision(2)));
  }
  for (const time of [0, 0.25, 0.5, 0.75, 1]) {
    drawing.append(svg("text", { class: "tick", x: x(time), y: height - 10, "text-anchor": time === 1 ? "end" : "middle" }, `t = ${time}`));
  }
  for (const part of parts) {
    const middle = (x(part.start) + x(part.end)) / 2;
    const value = part.nats_per_token, error = part.standard_error;
    drawing.append(svg("rect", { class: "column", x: x(part.start) + 1, width: x(part.end) - x(part.start) - 2, y: y(value), height: y(0) - y(value) }));
    drawing.append(svg("line", { class: "whisker", x1: middle, x2: middle, y1: y(value - error), y2: y(value + error) }));
  }
  $("by-time").replaceChildren(parts.length ? drawing : make("p", "soft", "This model has no time: its figure is exact."));
  const head = make("tr");
  head.append(...["from t", "to t", "nats per token", "standard error"].map((name) => make("th", "", name)));
  $("by-time-table").replaceChildren(head, ...parts.map((part) => {
    const row = make("tr");
    const cells = [part.start.toFixed(2), part.end.toFixed(2), part.nats_per_token.toFixed(4), part.standard_error.toFixed(4)];
    row.append(...cells.map((cell) => make("td", "", cell)));
    return row;
  }));
}

/* Set the form up; returns what follows the chosen model. */
export function setUpScoring() {
  keepField("score-text", true);
  keepField("draws");
  $("score-form").addEventListener("submit", score);
  $("surprise").addEventListener("keydown", moveFocus);
  return { showModel: () => { $("draws").max = model.limits.draws; }, describe: () => {} };
}
