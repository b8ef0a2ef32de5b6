"""A library of NVIDIA's driver that is no driver: what `libnvidia-ml.so.1` says, from a few lines of C."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int pid; unsigned long long bytes; unsigned int gi, ci; } process_t;
static int opened = 0;
static int slots[16];
#define CALL() if (!opened) return 1
static int number(void *handle) { return (int)((int *)handle - slots); }
static int partitioned(void) { return getenv("FAKE_MIG") != NULL; }
int nvmlInit_v2(void) { opened++; return getenv("FAKE_NO_DRIVER") ? 9 : 0; }
int nvmlShutdown(void) { opened--; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) {
    CALL(); snprintf(text, size, "580.159.01"); return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *found) {
    CALL(); *found = getenv("FAKE_CUDA") ? atoi(getenv("FAKE_CUDA")) : 13000; return 0;
}
int nvmlDeviceGetCount_v2(unsigned int *count) { CALL(); *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    CALL(); if (index > 1) return 2; *handle = &slots[index]; return 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned int size) {
    CALL(); int n = number(handle);
    const char *name = getenv("FAKE_NAME") ? getenv("FAKE_NAME") : "NVIDIA H200";
    snprintf(text, size, n < 2 ? "%s" : "%s MIG 1g.18gb", name); return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned int size) {
    CALL(); int n = number(handle);
    snprintf(text, size, "%s-%d%d%d%d-af", n < 2 ? "GPU" : "MIG", n, n, n, n); return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    CALL(); if (number(handle) > 1) return 3; *major = 9; *minor = 0; return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    CALL(); unsigned long long mib = 1 << 20;
    memory->total = (number(handle) < 2 ? 143771 : 16384) * mib;
    memory->used = (getenv("FAKE_USED_MIB") ? atoi(getenv("FAKE_USED_MIB")) : 0) * mib;
    memory->free = memory->total - memory->used; return 0;
}
int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending) {
    CALL(); *current = *pending = number(handle) == 1 && partitioned(); return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count) { CALL(); *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **found) {
    CALL(); if (index != 0 && index != 3) return 6; *found = &slots[10 + index]; return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, process_t *found) {
    CALL(); unsigned int pid = getenv("FAKE_PID") ? atoi(getenv("FAKE_PID")) : 0;
    if (!pid) { *count = 0; return 0; }
    if (*count < 2) { *count = 2; return 7; }
    found[0].pid = pid; found[0].bytes = 1 << 30; found[1].pid = pid + 1; *count = 2; return 0;
}
"""


def library(folder: Path) -> Path:
    """The library, compiled into `folder`; two H200, the second of them partitioned where FAKE_MIG is set.

    FAKE_NO_DRIVER, FAKE_CUDA, FAKE_NAME, FAKE_USED_MIB and FAKE_PID in the environment change what it says.
    """
    assert COMPILER is not None
    source = folder / "nvml.c"
    out = folder / "libnvidia-ml.so.1"
    source.write_text(SOURCE)
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", str(out), str(source)], check=True, timeout=60)
    return out
