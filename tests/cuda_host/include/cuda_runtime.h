// Everything is in cuda_host.h, which is always included first.
#pragma once
#include "cuda_host.h"
