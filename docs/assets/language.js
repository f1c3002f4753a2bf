// The other language's page opens at the same place: headings have the same ids in both languages, calculators the same state.
document.addEventListener("click", event => {
  const link = event.target instanceof Element && event.target.closest("a.md-select__link[hreflang]");
  if (link && location.hash) link.hash = location.hash;
}, true);
