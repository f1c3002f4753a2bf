// Charts have small letters on a phone: a touch opens the picture alone, so that the reader can enlarge it.
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll("article img")) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.className = "enlarge";
    link.href = image.src;
    image.replaceWith(link);
    link.append(image);
  }
});
