// Bulk numbers travel as bytes fields of little-endian 32-bit values (common.proto, conventions).
import { InvalidRequestError } from "./errors.js";

const INT32_MIN = -(2 ** 31);
const INT32_MAX = 2 ** 31 - 1;

/**
 * @param {Iterable<number>} values
 * @param {string} field for the error message
 * @returns {Buffer}
 */
export function packInts(values, field) {
  const list = [...values];
  const bytes = Buffer.allocUnsafe(4 * list.length);
  list.forEach((value, i) => {
    if (!Number.isInteger(value) || value < INT32_MIN || value > INT32_MAX) {
      throw new InvalidRequestError(`${field}[${i}] is ${String(value)}: send 32-bit whole numbers`, "INVALID_ARGUMENT", { field });
    }
    bytes.writeInt32LE(value, 4 * i);
  });
  return bytes;
}

/**
 * @param {Iterable<number>} values
 * @param {string} field for the error message
 * @returns {Buffer}
 */
export function packFloats(values, field) {
  const list = [...values];
  const bytes = Buffer.allocUnsafe(4 * list.length);
  list.forEach((value, i) => {
    if (typeof value !== "number" || Number.isNaN(value)) {
      throw new InvalidRequestError(`${field}[${i}] is ${String(value)}: send numbers`, "INVALID_ARGUMENT", { field });
    }
    bytes.writeFloatLE(value, 4 * i);
  });
  return bytes;
}

/** @param {Uint8Array} bytes @returns {number[]} */
export function unpackInts(bytes) {
  return unpack(bytes, (view, offset) => view.getInt32(offset, true));
}

/** @param {Uint8Array} bytes @returns {number[]} */
export function unpackFloats(bytes) {
  return unpack(bytes, (view, offset) => view.getFloat32(offset, true));
}

/**
 * @param {Uint8Array} bytes
 * @param {(view: DataView, offset: number) => number} read
 */
function unpack(bytes, read) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: bytes.byteLength / 4 }, (_, i) => read(view, 4 * i));
}
