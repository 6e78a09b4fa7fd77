/* The page: its tabs, the model it talks to, and its two forms. */

import { $, button, capital, make } from "./common.js";
import { samplerHelp } from "./samplers.js";
import { setUpScoring, setScoreText } from "./score.js";
import { callApi, model } from "./api.js";
import { saveStateSoon, restoreSampler, setUpState } from "./state.js";
import { setUpPlayback } from "./playback.js";
import { setUpGenerating, setText } from "./generate.js";

function choose(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  saveStateSoon();
}

function setUpTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(index + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    const form = document.querySelector("[role=tabpanel]:not([hidden]) form");
    if (!form.querySelector("[type=submit]").disabled) form.requestSubmit();
  });
}

function showSamplerHelp() {
  const { text, takesSteps } = samplerHelp($("sampler").value, model.default_sampler);
  $("sampler-help").textContent = text;
  $("steps").disabled = !takesSteps;
}

function showSamplers() {
  $("sampler").replaceChildren(...model.samplers.map((name) => {
    const option = make("option", "", name === "default" ? `default: ${model.default_sampler}` : name);
    option.value = name;
    return option;
  }));
  $("sampler").addEventListener("change", showSamplerHelp);
  showSamplerHelp();
  restoreSampler();
}

function showLimits() {
  for (const field of ["n", "steps", "draws"]) $(field).max = model.limits[field];
  $("length").max = Math.min(model.max_length, model.limits.max_tokens);
  const length = model.max_length >= 256 ? 48 : Math.max(1, Math.min(16, Math.floor(model.max_length / 3)));
  const untouched = $("length").value === $("length").defaultValue;
  $("length").defaultValue = Math.min(length, $("length").max);
  if (untouched) $("length").value = $("length").defaultValue;
}

function showExamples() {
  for (const [group, set] of [["examples", setText], ["score-examples", setScoreText]]) {
    $(group).append(...model.examples.map((example) => button(example.name, () => set(example, true), "small")));
    $(group).hidden = false;
    set(model.examples[0], false);
  }
}

async function loadModel() {
  try {
    const { data: cards } = await (await callApi("/v1/models")).json();
    const card = cards.find((each) => each.labels === null);  // a classifier fills no holes
    if (!card) throw new UserError("The model is still being loaded.");
    Object.assign(model, card);
    const size = new Intl.NumberFormat("en", { notation: "compact" }).format(model.num_parameters);
    $("model").textContent = `${model.id}: ${model.objective}, ${size} parameters, up to ${model.max_length} tokens`;
    showSamplers();
    showLimits();
    showExamples();
  } catch (error) {
    $("model").textContent = capital(error.message);
    setTimeout(loadModel, 2000);
  }
}

setUpTabs();
setUpGenerating();
setUpPlayback();
setUpScoring();
setUpState();
loadModel();
