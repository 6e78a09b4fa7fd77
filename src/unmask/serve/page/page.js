/* The page: its tabs, the model it talks to, and its two forms. */

import { $, ask, capital, make } from "./common.js";
import { setUpScoring } from "./score.js";
import { setUpStory } from "./story.js";
import { setUpWriting } from "./write.js";

function choose(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !chosen;
  }
}

function setUpTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const [place, tab] of tabs.entries()) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(place + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  }
}

async function findModel() {
  try {
    const { data: [model] } = await (await ask("/v1/models")).json();
    const size = new Intl.NumberFormat("en", { notation: "compact" }).format(model.parameters);
    $("model").textContent = `${model.id}: ${model.kind}, ${size} parameters, up to ${model.length} tokens`;
    $("sampler").replaceChildren(...model.samplers.map((name) => {
      const option = make("option", "", name);
      option.value = name;
      return option;
    }));
    const limits = { n: "n", steps: "steps", draws: "draws" };
    for (const [field, limit] of Object.entries(limits)) $(field).max = model.limits[limit];
    $("length").max = Math.min(model.length, model.limits.max_tokens);
    $("length").value = Math.min($("length").value, $("length").max);
  } catch (error) {
    $("model").textContent = capital(error.message);
    setTimeout(findModel, 2000);
  }
}

setUpTabs();
setUpWriting();
setUpStory();
setUpScoring();
findModel();
