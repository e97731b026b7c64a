// A checksum at memory speed, for what this machine wrote itself: it finds damage, and is no defence against malice.
#pragma once

// Two running sums in each of 16 lanes (Fletcher's scheme): of the words, and of those sums, so that order counts.
// Bytes behind the last whole vector count as if zeros followed. The same on every instruction set.
static uint64_t checksum(const char *data, int64_t bytes) {
    U sum = {}, weighted = {};
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        sum += load<U>(data + i);
        weighted += sum;
    }
    if (i < bytes) {
        char tail[64] = {};
        __builtin_memcpy(tail, data + i, (size_t)(bytes - i));
        sum += load<U>(tail);
        weighted += sum;
    }
    uint64_t found = (uint64_t)bytes;
    for (int lane = 0; lane < LANES; lane++) found = (found ^ sum[lane] ^ (uint64_t)weighted[lane] << 32) * 0x9e3779b97f4a7c15u;
    return found;
}
