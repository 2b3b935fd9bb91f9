// Pictures as the model saw them.

import { mediaSource, report } from "./documents.js";
import { el } from "./elements.js";
import { number, plain } from "./text.js";

/** An image with its size; a sentence where it is missing. */
export function picture(run, image, { isSmall = false, name = "image", side = 224 } = {}) {
  const source = mediaSource(run, image.hash);
  const size = `${number(image.width)} × ${number(image.height)} pixels`;
  const missing = () =>
    isSmall
      ? el("span", { class: "quiet", title: "The image is missing." }, "✗")
      : el(
          "p",
          { class: "problem" },
          report ? "The report leaves this image out, " : "The run's folder has no such image, ",
          size,
          ": ",
          el("code", {}, plain(image.hash).slice(0, 12)),
        );
  if (source === null) return missing();
  const pixels = Math.max(1, Math.min(isSmall ? 1 : 8, Math.floor(side / Math.max(image.width, image.height, 1))));
  const alternative = isSmall ? "" : `${name}, ${size}`;
  const shown = el("img", { src: source, alt: alternative, loading: "lazy", class: pixels > 1 ? "pixels" : null });
  if (!isSmall) shown.style.setProperty("width", `${Math.min(image.width * pixels, 640)}px`);
  if (isSmall) {
    shown.addEventListener("error", () => shown.replaceWith(missing()));
    return shown;
  }
  const caption = [`${name}: ${size}`, pixels > 1 ? `, shown ×${pixels}` : image.width > 640 ? ", shown smaller" : ""];
  const whole = el(
    "figure",
    { class: "picture" },
    shown,
    el("figcaption", {}, caption, report ? " (a thumbnail of them)" : ""),
  );
  shown.addEventListener("error", () => whole.replaceWith(missing()));
  return whole;
}

export function pictureRow(run, images) {
  const name = (i) => (images.length > 1 ? `image ${i + 1} of ${images.length}` : "image");
  const pictures = images.map((image, i) => picture(run, image, { name: name(i) }));
  return pictures.length ? el("div", { class: "pictures" }, pictures) : "";
}
