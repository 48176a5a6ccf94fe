/* A Vulkan driver that misbehaves at a stage of its life, and until then passes everything on to a real one.

   cc -shared -fPIC -DSTAGE=LOAD|NEGOTIATE|DEVICE|DISPATCH -DACTION=FAIL|CRASH|HANG [-DREAL='"libvulkan_lvp.so"'] */

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { LOAD, NEGOTIATE, DEVICE, DISPATCH };
enum { FAIL, CRASH, HANG };
enum { ERROR_INITIALIZATION_FAILED = -3 };

typedef void (*Function)(void);
typedef Function (*Lookup)(void *, const char *);

static int misbehave(void) {
    if (ACTION == CRASH)
        *(volatile int *)8 = 1;
    while (ACTION == HANG)
        pause();
    return ERROR_INITIALIZATION_FAILED;
}

__attribute__((constructor)) static void loaded(void) {
    if (STAGE == LOAD)
        misbehave();
}

#ifdef REAL
static void *real(const char *name) {
    static void *library;
    if (!library)
        library = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
    return library ? dlsym(library, name) : 0;
}

static Lookup of_device;

static void dispatch(void *commands, uint32_t x, uint32_t y, uint32_t z) {
    misbehave(); /* and where it fails, what was to be computed is not */
}

static Function device_lookup(void *device, const char *name) {
    Function found = of_device(device, name);
    return found && STAGE == DISPATCH && !strcmp(name, "vkCmdDispatch") ? (Function)dispatch : found;
}
#endif

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
#ifdef REAL
    Function found = ((Lookup)real("vk_icdGetInstanceProcAddr"))(instance, name);
    if (found && STAGE == DEVICE && !strcmp(name, "vkCreateDevice"))
        return (Function)misbehave;
    if (found && !strcmp(name, "vkGetDeviceProcAddr")) {
        of_device = (Lookup)found;
        return (Function)device_lookup;
    }
    return found;
#else
    return 0;
#endif
}

int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    if (STAGE == NEGOTIATE)
        return misbehave();
#ifdef REAL
    return ((int (*)(uint32_t *))real("vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
#else
    return 0;
#endif
}
