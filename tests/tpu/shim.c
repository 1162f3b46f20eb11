/* Lets torch_tpu drive XLA's CPU plugin, which speaks the interface of a TPU's (PJRT) and computes real values.

   Everything is passed on to the plugin named by CPU_PLUGIN, except the options with which torch_tpu creates its client:
   they are a TPU's, and the CPU's client refuses them. The layout is that of xla/pjrt/c/pjrt_c_api.h: a size, a pointer
   and a version of 24 bytes, and then functions, to which newer versions only append. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FUNCTIONS = 40, CLIENT_CREATE = 10 };

typedef void *(*Function)(void *);
typedef struct {
    size_t size;
    void *extensions;
    const void *options;
    size_t option_count;
} ClientCreate;

static Function client_create;

static void *without_options(void *argument) {
    ClientCreate *call = argument;
    const ClientCreate asked = *call;
    call->options = NULL;
    call->option_count = 0;
    void *error = client_create(call);
    call->options = asked.options;
    call->option_count = asked.option_count;
    return error;
}

const void *GetPjrtApi(void) {
    void *plugin = dlopen(getenv("CPU_PLUGIN"), RTLD_NOW | RTLD_LOCAL);
    if (!plugin) {
        fprintf(stderr, "CPU_PLUGIN: %s\n", dlerror());
        abort();
    }
    const void *(*get)(void) = (const void *(*)(void))dlsym(plugin, "GetPjrtApi");
    const void *theirs = get();
    char *ours = malloc(*(const size_t *)theirs);
    memcpy(ours, theirs, *(const size_t *)theirs);
    Function *functions = (Function *)(ours + FUNCTIONS);
    client_create = functions[CLIENT_CREATE];
    functions[CLIENT_CREATE] = without_options;
    return ours;
}
