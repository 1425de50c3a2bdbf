/* Keeps conversations in this browser (IndexedDB). The server keeps none.

A conversation is { id, title, time, messages }. A message has a role and a text, and media (of a user), or reasoning,
calls of tools, an error and measurements (of the assistant), or the id of a call (the result of a tool). */
const STORE = "conversations", INDEX = "time and title";
let opened = null;

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function store(mode) {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("tilerank", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(STORE, { keyPath: "id" }).createIndex(INDEX, ["time", "title"]);
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened.then((database) => database.transaction(STORE, mode).objectStore(STORE));
}

// Returns the id and the title of every conversation, the newest first. Pictures stay where they are.
export async function list() {
  const cursors = (await store("readonly")).index(INDEX).openKeyCursor(null, "prev");
  return new Promise((resolve, reject) => {
    const found = [];
    cursors.onerror = () => reject(cursors.error);
    cursors.onsuccess = () => {
      const cursor = cursors.result;
      if (!cursor) return resolve(found);
      found.push({ id: cursor.primaryKey, title: cursor.key[1] });
      return cursor.continue();
    };
  });
}

export const load = async (id) => done((await store("readonly")).get(id));
export const save = async (conversation) => done((await store("readwrite")).put(conversation));
export const remove = async (id) => done((await store("readwrite")).delete(id));
