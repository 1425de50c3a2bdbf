/* Elements and formats that all pages share. */
export const at = (id) => document.getElementById(id);

// Returns an element. fields: its properties, or attributes where there is no property of that name.
export function element(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function button(text, onclick, fields = {}) {
  return element("button", { type: "button", textContent: text, onclick, ...fields });
}

export const number = (n) => n.toLocaleString("en");

export function seconds(s) {
  if (s < 0.01) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 90) return `${s.toFixed(1)} s`;
  const minutes = Math.round(s / 60), hours = Math.round(s / 3600);
  return minutes < 90 ? `${minutes} min` : hours < 48 ? `${hours} h` : `${Math.round(s / 86400)} days`;
}

// Copies a text, or selects the element that shows it where the page may not write to the clipboard.
export async function copy(pressed, text, shown) {
  const name = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {  // no permission, or a page without TLS
    getSelection().selectAllChildren(shown);
    pressed.textContent = "Selected";
  }
  setTimeout(() => { pressed.textContent = name; }, 2000);
}
