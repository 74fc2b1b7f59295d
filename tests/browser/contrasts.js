// Each text that is seen, and the contrast of its colour with that of its ground (WCAG 2.2, 1.4.3 and "relative
// luminance"), except of disabled controls, which it exempts; what is faded lets the page's own ground through.
(() => {
  const WEIGHTS = [0.2126, 0.7152, 0.0722];
  const linear = (one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  const luminance = (rgb) => rgb.reduce((sum, one, place) => sum + linear(one / 255) * WEIGHTS[place], 0);
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      if (one.matches(".used > .label")) one = one.previousElementSibling; // it stands on what is used, at its worst
      const colour = numbers(getComputedStyle(one).backgroundColor);
      if (colour[3] !== 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const page = numbers(getComputedStyle(document.body).backgroundColor);
  const faded = (colour, element) => {
    let part = 1;
    for (let one = element; one; one = one.parentElement) part *= Number(getComputedStyle(one).opacity);
    return colour.map((tone, place) => tone * part + page[place] * (1 - part));
  };
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (words.nextNode()) {
    const text = words.currentNode.data.trim();
    const element = words.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest("noscript, .skip, :disabled")) continue;
    const both = [numbers(getComputedStyle(element).color).slice(0, 3), ground(element)]
      .map((colour) => luminance(faded(colour, element)));
    found.push([text, (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05)]);
  }
  return found;
})()
