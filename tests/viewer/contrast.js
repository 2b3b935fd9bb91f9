// Run in the page: texts whose contrast with what is behind them is under 4.5, and the page's own ground.
const parts = (color) => (color.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
const over = ([r, g, b, a = 1], below) => [r, g, b].map((each, i) => each * a + below[i] * (1 - a));
const light = (color) =>
  color
    .map((each) => each / 255)
    .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
const ground = (node) => {
  const layers = [];
  for (let each = node; each; each = each.parentElement) layers.push(parts(getComputedStyle(each).backgroundColor));
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
};
const poor = [];
for (const node of document.querySelectorAll("body *")) {
  const style = getComputedStyle(node);
  const isShown =
    node.checkVisibility({ opacityProperty: true, visibilityProperty: true }) &&
    !node.closest("[disabled], .off, .unseen, #skip, option, datalist");
  if (!isShown || ![...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim())) continue;
  const below = ground(node),
    color = over(parts(node.closest("svg") ? style.fill : style.color), below);
  const [one, other] = [light(below), light(color)].sort((a, b) => b - a);
  const ratio = (one + 0.05) / (other + 0.05);
  if (ratio < 4.5)
    poor.push(
      `${ratio.toFixed(2)} ${node.tagName}.${node.className?.baseVal ?? node.className}: ${node.textContent.slice(0, 40)}`,
    );
}
return [poor, getComputedStyle(document.documentElement).backgroundColor];
