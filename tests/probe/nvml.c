/* The part of NVML (nvml.h) that tunekit asks for, answered from a table that a test writes. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

struct device {
    const char *uuid, *name;
    unsigned long long total, free;
    int major, minor, pcie_generation, pcie_width; /* a generation of 0 is not told */
    int num_nvlinks, num_active, nvlink_mbps;      /* a speed of 0 is not told */
    int mig;                                       /* -1: not divided; else the number of MIG devices */
    const struct device *parts;
};

#include "devices.h" /* static const struct device devices[]; static const int p2p[][8] */

enum { NUM = sizeof devices / sizeof devices[0] };

typedef const struct device *handle;
struct memory { unsigned long long total, free, used; };
struct field { uint32_t field, scope; int64_t timestamp, latency; int type, result; union { unsigned ui; double d; } value; };

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return getenv("NVML_INIT") ? atoi(getenv("NVML_INIT")) : OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = NUM; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *found) { *found = &devices[index]; return OK; }
int nvmlDeviceGetHandleByUUID(const char *uuid, handle *found)
{
    for (int i = 0; i < NUM; i++) {
        if (!strcmp(devices[i].uuid, uuid)) return *found = &devices[i], OK;
        for (int part = 0; part < devices[i].mig; part++)
            if (!strcmp(devices[i].parts[part].uuid, uuid)) return *found = &devices[i].parts[part], OK;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetUtilizationRates(handle device, unsigned rates[2])
{
    rates[0] = 93, rates[1] = 40;
    return device->major ? OK : NOT_SUPPORTED; /* MIG devices have none */
}
int nvmlDeviceGetName(handle device, char *text, unsigned size) { snprintf(text, size, "%s", device->name); return OK; }
int nvmlDeviceGetUUID(handle device, char *text, unsigned size) { snprintf(text, size, "%s", device->uuid); return OK; }
int nvmlDeviceGetMemoryInfo(handle device, struct memory *memory)
{
    memory->total = device->total, memory->free = device->free, memory->used = device->total - device->free;
    return device->total ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetCudaComputeCapability(handle device, int *major, int *minor)
{
    *major = device->major, *minor = device->minor;
    return device->major ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxPcieLinkGeneration(handle device, unsigned *generation)
{
    *generation = device->pcie_generation;
    return device->pcie_generation ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMaxPcieLinkWidth(handle device, unsigned *width) { *width = device->pcie_width; return OK; }
int nvmlDeviceGetNvLinkState(handle device, unsigned link, int *active)
{
    *active = (int)link < device->num_active;
    return !device->num_nvlinks ? NOT_SUPPORTED : (int)link < device->num_nvlinks ? OK : INVALID_ARGUMENT;
}
int nvmlDeviceGetFieldValues(handle device, int count, struct field *fields)
{
    for (int i = 0; i < count; i++) {
        int told = fields[i].field == 90 && device->nvlink_mbps;
        fields[i].result = told ? OK : NOT_SUPPORTED, fields[i].type = 1, fields[i].value.ui = device->nvlink_mbps;
    }
    return OK;
}
int nvmlDeviceGetP2PStatus(handle one, handle other, int capability, int *status)
{
    if (capability != 2) return INVALID_ARGUMENT;
    *status = p2p[one - devices][other - devices] ? 0 : 5;
    return OK;
}
int nvmlDeviceGetMigMode(handle device, unsigned *current, unsigned *pending)
{
    *current = *pending = device->mig >= 0;
    return device->mig < 0 ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetMaxMigDeviceCount(handle device, unsigned *count) { (void)device; *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(handle device, unsigned index, handle *found)
{
    if ((int)index >= device->mig) return NOT_FOUND;
    *found = &device->parts[index];
    return OK;
}
