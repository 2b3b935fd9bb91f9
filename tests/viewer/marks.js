// Run in the page: whatever a hostile text might have left in it.
const nodes = [...document.querySelectorAll("*")];
const texts = [document.body.innerText, ...nodes.flatMap((node) => [...node.attributes].map((each) => each.value))];
return {
  title: document.title,
  scripts: document.scripts.length,
  foreign: nodes.filter(
    (node) =>
      ["B", "IMG", "A"].includes(node.tagName) &&
      (/^(x|javascript:)/.test(node.getAttribute("src") ?? node.getAttribute("href") ?? "") ||
        node.textContent === "bold"),
  ).length,
  handlers: nodes.filter((node) =>
    [...node.attributes].some(
      (each) => each.name.startsWith("on") || (each.name === "style" && /url/.test(each.value)),
    ),
  ).length,
  hidden: texts.filter((text) =>
    /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u202a-\u202e\u2028\u2029\u2066-\u2069]/.test(text),
  ).length,
  shown: document.body.textContent.includes("<img src=x onerror="),
};
