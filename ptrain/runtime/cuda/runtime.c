/* A CUDA runtime without a device. One GPU of the compute capability that PTRAIN_SM names (90 if it
   names none) seems to be there: torch asks it which kernels to take, and launches none, for its
   tensors are fake. The few real ones (integers that DDP's reducer reads back) live in the host's
   memory, and copies between "device" and host are copies there. Loaded ahead of libcudart. */

#include <stdlib.h>
#include <string.h>

#include <driver_types.h>

#define SEEN __attribute__((visibility("default")))
#define DONE \
    { return cudaSuccess; }

static int capability(void) {
    const char *said = getenv("PTRAIN_SM");
    int sm = said ? atoi(said) : 0;
    return sm > 0 ? sm : 90;
}

/* 80 GiB: how much there is decides about no kernel. */
static const size_t MEMORY = 80ull << 30;
enum { PROCESSORS = 132, VERSION = 13000 };

/* -- the device */

SEEN cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
SEEN cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
SEEN cudaError_t cudaSetDevice(int device) DONE
SEEN cudaError_t cudaDeviceSynchronize(void) DONE
SEEN cudaError_t cudaDriverGetVersion(int *version) { *version = VERSION; return cudaSuccess; }
SEEN cudaError_t cudaRuntimeGetVersion(int *version) { *version = VERSION; return cudaSuccess; }
SEEN cudaError_t cudaGetLastError(void) DONE
SEEN cudaError_t cudaPeekAtLastError(void) DONE
SEEN cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return cudaSuccess; }

SEEN cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = PROCESSORS; break;
    default: *value = 1;
    }
    return cudaSuccess;
}

SEEN cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *is, int device) {
    memset(is, 0, sizeof *is);
    strcpy(is->name, "a GPU that is not there");
    is->major = capability() / 10;
    is->minor = capability() % 10;
    is->multiProcessorCount = PROCESSORS;
    is->totalGlobalMem = MEMORY;
    is->warpSize = 32;
    is->maxThreadsPerBlock = 1024;
    is->maxThreadsPerMultiProcessor = 2048;
    is->regsPerMultiprocessor = 65536;
    is->sharedMemPerBlock = 48 << 10;
    is->sharedMemPerBlockOptin = 227 << 10;
    is->sharedMemPerMultiprocessor = 228 << 10;
    return cudaSuccess;
}

/* What the headers of CUDA 12 call it. */
SEEN cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *is, int device) {
    return cudaGetDeviceProperties(is, device);
}

/* -- memory */

SEEN cudaError_t cudaMalloc(void **place, size_t size) {
    *place = calloc(1, size ? size : 1);
    return *place ? cudaSuccess : cudaErrorMemoryAllocation;
}
SEEN cudaError_t cudaFree(void *place) { free(place); return cudaSuccess; }
SEEN cudaError_t cudaHostAlloc(void **place, size_t size, unsigned flags) { return cudaMalloc(place, size); }
SEEN cudaError_t cudaFreeHost(void *place) { return cudaFree(place); }
SEEN cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { *left = *all = MEMORY; return cudaSuccess; }
SEEN cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    memmove(to, from, size);
    return cudaSuccess;
}
SEEN cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, size, kind, 0);
}
SEEN cudaError_t cudaMemsetAsync(void *place, int value, size_t size, cudaStream_t stream) {
    memset(place, value, size);
    return cudaSuccess;
}

/* -- streams and events: all is over at once */

static cudaError_t made(void **thing) {
    *thing = malloc(8);
    return *thing ? cudaSuccess : cudaErrorMemoryAllocation;
}

SEEN cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return made((void **)stream);
}
SEEN cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return made((void **)stream);
}
SEEN cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    *least = 0;
    *most = -5;
    return cudaSuccess;
}
SEEN cudaError_t cudaStreamQuery(cudaStream_t stream) DONE
SEEN cudaError_t cudaStreamSynchronize(cudaStream_t stream) DONE
SEEN cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) DONE
SEEN cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
/* Of several signatures the status is the second argument of each. */
SEEN cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamIsCapturing(stream, status);
}
SEEN cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamIsCapturing(stream, status);
}
SEEN cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) DONE

SEEN cudaError_t cudaEventCreate(cudaEvent_t *event) { return made((void **)event); }
SEEN cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return made((void **)event); }
SEEN cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) DONE
SEEN cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) DONE
SEEN cudaError_t cudaEventQuery(cudaEvent_t event) DONE
SEEN cudaError_t cudaEventSynchronize(cudaEvent_t event) DONE
SEEN cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
SEEN cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 0;
    return cudaSuccess;
}
