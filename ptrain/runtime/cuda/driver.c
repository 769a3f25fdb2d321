/* libcuda, as far as torch looks whether it is there: a primary context that nobody has made. */

#define SEEN __attribute__((visibility("default")))
#define DONE \
    { return 0; }

SEEN int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = 0;
    return 0;
}
SEEN int cuCtxGetCurrent(void **context) { *context = 0; return 0; }
SEEN int cuGetErrorString(int error, const char **text) { *text = "no error"; return 0; }
SEEN int cuCtxSetCurrent(void) DONE
SEEN int cuDeviceGet(void) DONE
SEEN int cuDeviceGetAttribute(void) DONE
SEEN int cuDevicePrimaryCtxRetain(void) DONE
SEEN int cuFuncGetAttribute(void) DONE
SEEN int cuFuncSetAttribute(void) DONE
SEEN int cuFuncSetCacheConfig(void) DONE
SEEN int cuLaunchCooperativeKernel(void) DONE
SEEN int cuLaunchKernel(void) DONE
SEEN int cuLinkAddData_v2(void) DONE
SEEN int cuLinkComplete(void) DONE
SEEN int cuLinkCreate_v2(void) DONE
SEEN int cuMemGetAddressRange_v2(void) DONE
SEEN int cuModuleGetFunction(void) DONE
SEEN int cuModuleLoad(void) DONE
SEEN int cuModuleLoadData(void) DONE
SEEN int cuModuleLoadDataEx(void) DONE
SEEN int cuModuleUnload(void) DONE
SEEN int cuOccupancyMaxActiveBlocksPerMultiprocessor(void) DONE
SEEN int cuPointerGetAttribute(void) DONE
SEEN int cuTensorMapEncodeTiled(void) DONE
