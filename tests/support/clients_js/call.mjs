// node call.mjs SCRIPT FUNCTION: calls it with the object on stdin, prints what it returns.
import { text } from "node:stream/consumers";

const [script, name] = process.argv.slice(2);
const functions = await import(script);
const result = await functions[name](JSON.parse(await text(process.stdin)));
console.log(JSON.stringify(result));
