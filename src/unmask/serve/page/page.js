/* The page: its tabs, and the model that it talks to. */

import { $, button, capital } from "./common.js";
import { callApi, model, UserError } from "./api.js";
import { setChoices } from "./form.js";
import { choicesChanged, keep, keepList, saveStateSoon, setUpState } from "./state.js";
import { setUpChat } from "./chat.js";
import { setText, setUpGenerating, shownExample } from "./generate.js";
import { setUpPlayback } from "./playback.js";
import { setUpScoring, setScoreText } from "./score.js";

const tabs = [...document.querySelectorAll("[role=tab]")];
const shownTabs = () => tabs.filter((tab) => !tab.hidden);
const panelOf = (tab) => tab.getAttribute("aria-controls");
const chosenTab = () => tabs.find((tab) => tab.getAttribute("aria-selected") === "true");

const forms = []; // each can show a model's facts, and what the API's description says of its controls
let cards = []; // of the models that write text

function choose(tab) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    $(panelOf(each)).hidden = !chosen;
  }
  saveStateSoon();
}

function setUpTabs() {
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const shown = shownTabs(), last = shown.length - 1, index = shown.indexOf(tab);
      const next = { ArrowRight: index === last ? 0 : index + 1, ArrowLeft: index === 0 ? last : index - 1, Home: 0, End: last }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      choose(shown[next]);
      shown[next].focus();
    });
  }
  keep("tab", {
    read: () => panelOf(chosenTab()),
    write: (value) => choose(tabs.find((tab) => panelOf(tab) === value) ?? tabs[0]),
    initial: () => panelOf(tabs[0]),
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    const form = document.querySelector("[role=tabpanel]:not([hidden]) form");
    if (!form.querySelector("[type=submit]").disabled) form.requestSubmit();
  });
}

/* The model's examples; `replace` the text that is there, an example of another model. */
function showExamples(replace) {
  for (const [group, set] of [["examples", setText], ["score-examples", setScoreText]]) {
    const buttons = model.examples.map((example) => button(example.name, () => set(example, true), "small"));
    $(group).replaceChildren($(group).firstElementChild, ...buttons);
    $(group).hidden = false;
  }
  setText(model.examples[0], replace);
  setScoreText(model.examples[0], false);
}

/* Talk to the chosen model: all controls follow its card. */
function useChosenModel() {
  const isExample = shownExample() !== undefined;
  Object.assign(model, cards.find(({ id }) => id === $("chosen-model").value));
  const size = new Intl.NumberFormat("en", { notation: "compact" }).format(model.num_parameters);
  const name = cards.length > 1 ? "" : `${model.id}: `;
  $("model").textContent = `${name}${model.objective}, ${size} parameters, up to ${model.max_length} tokens`;
  for (const form of forms) form.showModel();
  showExamples(isExample);
}

/* The models that write text; the chosen one stays. */
function showModels() {
  setChoices($("chosen-model"), cards.map(({ id }) => [id, id]));
  choicesChanged($("chosen-model"));
  $("model-choice").hidden = cards.length < 2;
  $("tab-chat").hidden = !cards.some((card) => card.chat);
  if (chosenTab().hidden) choose(tabs[0]);
  useChosenModel();
}

const getJson = async (path) => (await callApi(path)).json();

/* Learn what the server has, and again as long as it loads models, which it lists once they are loaded. */
async function loadModels() {
  let isLoading = true;
  try {
    const [{ data }, { models = {} }] = await Promise.all(["/v1/models", "/health"].map(getJson));
    const found = data.filter((card) => card.samplers.length); // a classifier writes nothing
    isLoading = !found.length || Object.values(models).includes("loading");
    if (!found.length) throw new UserError("No model that writes text is loaded yet.");
    if (!cards.length) {
      const { components } = await getJson("/openapi.json");
      for (const form of forms) form.describe(components.schemas);
    }
    if (found.length !== cards.length) {
      cards = found;
      showModels();
    }
  } catch (error) {
    if (!cards.length) $("model").textContent = capital(error.message);
  }
  if (isLoading) setTimeout(loadModels, 2000);
}

keepList("chosen-model");
setUpTabs();
forms.push(setUpGenerating(), setUpChat(), setUpScoring());
setUpPlayback();
setUpState();
$("chosen-model").addEventListener("change", useChosenModel);
loadModels();
