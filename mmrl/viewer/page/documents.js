// Documents, which come from the server (`data/RESOURCE`) or lie in the report.

/** A sentence that is shown in place of a page. */
export class Problem extends Error {
  constructor(text, mayPass = false) {
    super(text);
    this.mayPass = mayPass;
  }
}

const KEPT_TABLES = 80;
export const documents = new Map();
export const report = embeddedReport();

/** What a report has inside; null if the page is served. */
function embeddedReport() {
  const node = document.getElementById("report");
  return node ? JSON.parse(node.textContent) : null;
}

/** A document; a promise of it is kept. Of rollouts some are, the least recently asked for go first. */
export function load(resource) {
  const kept = documents.get(resource);
  documents.delete(resource);
  const promise = kept ?? (report ? embedded(resource) : fetched(resource));
  documents.set(resource, promise);
  if (!kept) promise.catch(() => documents.get(resource) === promise && documents.delete(resource));
  const tables = isOfRollouts(resource) ? [...documents.keys()].filter(isOfRollouts) : [];
  if (tables.length > KEPT_TABLES) documents.delete(tables[0]);
  return promise;
}

/** True for what a run's file of rollouts holds, and not for its history. */
function isOfRollouts(resource) {
  return /^run\/\d+\/(step|evaluation|blank|prompt)\b/.test(resource);
}

export function inReport(resource) {
  return report && Object.hasOwn(report.documents, resource) ? report.documents[resource] : undefined;
}

async function embedded(resource) {
  const found = inReport(resource);
  if (found !== undefined) return checked(found);
  throw new Problem("This report leaves that out: it holds a part of the run only. `mmrl view RUN` shows all of it.");
}

export async function fetched(resource) {
  if (location.protocol === "file:") {
    throw new Problem(
      "This page has no data inside. `mmrl view RUN` serves it with a run, `mmrl report RUN -o FILE` writes one file.",
    );
  }
  let answer;
  try {
    answer = await fetch(`data/${resource}`, { cache: "no-store", credentials: "same-origin" });
  } catch {
    throw new Problem("The viewer's server does not answer: `mmrl view` may have ended. Start it again.", true);
  }
  const found = await answer.json().catch(() => null);
  if (answer.ok && found !== null) return checked(found);
  if (found?.problem) throw new Problem(found.problem, answer.status >= 500);
  if (answer.status === 401 || answer.status === 403) {
    throw new Problem("The server does not know this browser: open the address that `mmrl view` printed.");
  }
  throw new Problem(`The server's answer to ${resource} cannot be read (status ${answer.status}).`, true);
}

/** The document, unless it is nothing but a problem. */
function checked(found) {
  if (found && found.problem && Object.keys(found).length === 1) throw new Problem(found.problem);
  return found;
}

/** The document, or this if there is none. */
export async function loadOr(resource, otherwise) {
  try {
    return await load(resource);
  } catch (error) {
    if (error instanceof Problem && !error.mayPass) return otherwise;
    throw error;
  }
}

export function mediaSource(run, hash) {
  if (typeof hash !== "string" || !/^[0-9a-f]{64}$/.test(hash)) return null;
  if (!report) return `media/${run}/${hash}`;
  const found = Object.hasOwn(report.media ?? {}, hash) ? report.media[hash] : null;
  return found?.startsWith("data:image/") ? found : null;
}
