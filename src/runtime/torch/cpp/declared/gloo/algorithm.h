// See context.h.
#include "gloo/context.h"
