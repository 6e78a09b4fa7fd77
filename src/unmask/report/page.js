// A slider over the steps of the samplers: a token that is not yet written is a bar of its final width.
// Without JavaScript the page shows the finished texts.
(() => {
  const panel = document.querySelector(".scrubber");
  if (!panel) return;
  const slider = panel.querySelector("input");
  const button = panel.querySelector("button");
  const output = panel.querySelector("output");
  const last = Number(slider.max);
  const tokens = [...document.querySelectorAll("[data-step]")].map((element) => ({
    element,
    text: element.textContent,
    step: Number(element.dataset.step),
    earlier: JSON.parse(element.dataset.earlier || "[]"),
  }));

  function shown(token, now) {
    if (now >= token.step) return token.text;
    const passed = token.earlier.filter(([step]) => step <= now);
    return passed.length ? passed[passed.length - 1][1] : "";
  }

  function show(now) {
    for (const token of tokens) {
      const text = shown(token, now);
      token.element.classList.toggle("hidden", text === "" && token.text !== "");
      token.element.textContent = text || token.text;
    }
    slider.value = now;
    output.textContent = `step ${now} of ${last}`;
    slider.setAttribute("aria-valuetext", output.textContent);
  }

  let timer = null;
  function stop() {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  }

  function play() {
    if (Number(slider.value) >= last) show(0);
    button.textContent = "Pause";
    timer = setInterval(() => {
      show(Math.min(last, Number(slider.value) + 1));
      if (Number(slider.value) >= last) stop();
    }, Math.max(40, 6000 / last));
  }

  slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
  button.addEventListener("click", () => (timer === null ? play() : stop()));
  show(last);
  panel.hidden = false;
})();
