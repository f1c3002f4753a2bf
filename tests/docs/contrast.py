"""The contrast of every visible text of a page with its ground, computed in the browser as WCAG 2 defines it."""

from __future__ import annotations

from tests.docs.browser import Browser

LEAST = 4.5  # WCAG 2.2, success criterion 1.4.3, text of normal size; large text needs 3
LARGE = 3.0

# Texts whose contrast is too small: [ratio, text, colour, ground]. A ground is what the elements behind the text add up to.
TOO_FAINT = """((least, large) => {
    const parse = text => {
        const found = /rgba?\\(([^)]+)\\)|color\\(srgb ([^)]+)\\)/.exec(text);
        if (!found) return null;
        const parts = (found[1] || found[2]).split(/[ ,/]+/).map(Number), by = found[1] ? 255 : 1;
        return [parts[0] / by, parts[1] / by, parts[2] / by, parts.length > 3 ? parts[3] : 1];
    };
    const over = (top, below) => [0, 1, 2].map(n => top[n] * top[3] + below[n] * (1 - top[3])).concat(1);
    const luminance = colour => {
        const [r, g, b] = colour.slice(0, 3).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const opacity = element => {
        let all = 1;
        for (let e = element; e; e = e.parentElement) all *= Number(getComputedStyle(e).opacity);
        return all;
    };
    const ground = element => {
        const layers = [];
        for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
        let colour = [1, 1, 1, 1];
        for (const layer of layers.reverse()) if (layer && layer[3]) colour = over(layer, colour);
        return colour;
    };
    const filled = (shape, below) => {
        const style = getComputedStyle(shape), fill = parse(style.fill);
        return fill ? over([...fill.slice(0, 3), fill[3] * Number(style.fillOpacity)], below) : below;
    };
    const found = [], seen = new Set();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
        if (!text || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
        if (!element.getClientRects().length || element.closest("script, style, option, [disabled], .md-skip")) continue;
        const style = getComputedStyle(element), drawn = element.closest("svg");
        let below = ground(element), colour = parse(drawn ? style.fill : style.color);
        const work = element.closest(".tool-work");
        if (work) below = filled(work.querySelector("rect"), filled(drawn.querySelector(".tool-idle"), below));
        const on = element.matches(".figure-on, .figure-number")
            && element.parentElement.querySelector("rect:not(.figure-edge):not(.figure-empty)");
        if (on) below = filled(on, filled(drawn.querySelector(".figure-empty") ?? on, below));
        if (!colour) continue;
        colour = over([...colour.slice(0, 3), colour[3] * opacity(element)], below);
        const [high, low] = [luminance(colour), luminance(below)].sort((a, b) => b - a);
        const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize);
        const big = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        const key = `${element.tagName}.${element.className.baseVal ?? element.className} ${ratio.toFixed(2)}`;
        if (ratio < (big ? large : least) && !seen.has(key)) {
            seen.add(key);
            const rgb = c => c.slice(0, 3).map(n => Math.round(255 * n)).join(",");
            found.push(`${ratio.toFixed(2)}: ${key.split(" ")[0]} "${text.slice(0, 30)}", ${rgb(colour)} on ${rgb(below)}`);
        }
    }
    return found;
})"""


def scheme(browser: Browser, name: str) -> None:
    """Sets the system's colour scheme, 'light' or 'dark', which pages follow."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])


def too_faint(browser: Browser) -> list[str]:
    """The texts of the open page whose contrast is too small."""
    return browser.evaluate(f"{TOO_FAINT}({LEAST}, {LARGE})")
