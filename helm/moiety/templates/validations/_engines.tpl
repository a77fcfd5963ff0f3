{{/* Refuse engines that cannot work. */}}

{{/* Of a pool: its GPUs, memory, probes and update strategy. */}}
{{- define "moiety.validateDevices" -}}
{{- $options := .options -}}
{{- $ranks := 1 -}}
{{- $sizes := "options.tp × options.pp × options.dp-attention × options.prefill-context-parallel + options.ffn-ranks" -}}
{{- if eq .kind "vllm" -}}
{{- $sizes = "options.tensor-parallel-size × options.pipeline-parallel-size × options.data-parallel-size" -}}
{{- $replicas := get $options "data-parallel-size-local" | default (get $options "data-parallel-size") | default 1 -}}
{{- $ranks = mul (get $options "tensor-parallel-size" | default 1) (get $options "pipeline-parallel-size" | default 1) $replicas -}}
{{- else -}}
{{- $ranks = add (mul ($options.tp | default 1) ($options.pp | default 1) (get $options "dp-attention" | default 1) (get $options "prefill-context-parallel" | default 1)) (get $options "ffn-ranks" | default 0) -}}
{{- end -}}
{{- if and (eq (int .nodes) 1) (gt (int .gpus) 0) (ne (int .gpus) (int $ranks)) -}}
{{- fail (printf "pool %s has gpus=%d, and its options use %d: set gpus to %s, or change these options" .name (int .gpus) (int $ranks) $sizes) -}}
{{- end -}}
{{- if hasKey (.resources.limits | default dict) .gpuResource -}}
{{- fail (printf "pool %s sets resources.limits.%s: set gpus instead, from which the chart sets it" .name .gpuResource) -}}
{{- end -}}
{{- $limit := (.resources.limits | default dict).memory -}}
{{- if and $limit (ge (include "moiety.amount" (list (printf "pool %s: sharedMemory" .name) .sharedMemory) | float64) (include "moiety.amount" (list (printf "pool %s: resources.limits.memory" .name) $limit) | float64)) -}}
{{- fail (printf "pool %s has sharedMemory=%s, which counts as memory of the pod, and resources.limits.memory=%v: raise the limit or lower sharedMemory" .name .sharedMemory $limit) -}}
{{- end -}}
{{- if and (gt (int .nodes) 1) (eq (.updateStrategy.type | default "") "OnDelete") -}}
{{- fail (printf "pool %s has nodes greater than 1, and a LeaderWorkerSet has no updateStrategy OnDelete: leave updateStrategy.type out" .name) -}}
{{- end -}}
{{- if and (eq (int .nodes) 1) (hasKey (.updateStrategy.rollingUpdate | default dict) "maxSurge") -}}
{{- fail (printf "pool %s sets updateStrategy.rollingUpdate.maxSurge, which a StatefulSet does not have: leave it out" .name) -}}
{{- end -}}
{{- end -}}

{{/* Of a pool: the tokenizer that gateways read for a vLLM pool. */}}
{{- define "moiety.validateTokenizer" -}}
{{- $model := .model -}}
{{- if and (eq .kind "vllm") (not (or $model.tokenizerClaim $model.tokenizerHub $model.hub)) -}}
{{- fail (printf "pool %s runs vLLM, and gateways need its tokenizer to count tokens: set model.tokenizerHub to a model ID on the hub, or model.tokenizerClaim to a claim with the tokenizer's folder" .name) -}}
{{- end -}}
{{- if and $model.tokenizerClaim $model.tokenizerHub -}}
{{- fail (printf "pool %s has two sources for its tokenizer: set one of model.tokenizerClaim and model.tokenizerHub" .name) -}}
{{- end -}}
{{- if and $model.tokenizerPath (not $model.tokenizerClaim) -}}
{{- fail (printf "pool %s has a model.tokenizerPath, but no volume that contains it: set model.tokenizerClaim, or leave model.tokenizerPath empty" .name) -}}
{{- end -}}
{{- end -}}

{{/* Engines that already run. */}}
{{- define "moiety.validateExternal" -}}
{{- $names := list -}}
{{- range .Values.engines }}{{ $names = append $names .name }}{{ end -}}
{{- $priced := list -}}
{{- range .Values.declared.prices }}{{ if not .service_class }}{{ $priced = append $priced .model }}{{ end }}{{ end -}}
{{- range .Values.externalEngines -}}
{{- $external := . -}}
{{- if has .name $names -}}
{{- fail (printf "two engines are named %s: give each pool of engines and each of externalEngines its own name" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if eq (empty .address) (empty .url) -}}
{{- fail (printf "externalEngines (%s) needs either the address of Moiety engines, such as dns+tcp://engines.ml.svc:5757, or the url of an OpenAI-compatible server, such as http://vllm.ml.svc:8000/v1: set one of the two" .name) -}}
{{- end -}}
{{- $ofServer := omit . "name" "address" "url" -}}
{{- if and .address $ofServer -}}
{{- fail (printf "externalEngines (%s) has an address of Moiety engines, which report their model themselves: leave %s out" .name (keys $ofServer | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $tokenizer := .tokenizer | default dict -}}
{{- $ofProvider := list -}}
{{- range $key := list "api" "servedName" "maxOutputTokens" "timeoutSeconds" "retries" "limitField" "price" -}}{{- if hasKey $external $key }}{{ $ofProvider = append $ofProvider $key }}{{ end -}}{{- end -}}
{{- if eq (.kind | default "") "hosted" -}}
{{- if not (and .url .model .contextTokens) -}}
{{- fail (printf "externalEngines (%s) is a hosted provider: set its url, such as https://api.openai.com/v1, its model, and contextTokens, the model's context length" .name) -}}
{{- end -}}
{{- $ofEngine := list -}}
{{- range $key := list "tokenizer" "priority" "sharedCache" -}}{{- if hasKey $external $key }}{{ $ofEngine = append $ofEngine $key }}{{ end -}}{{- end -}}
{{- if $ofEngine -}}
{{- fail (printf "externalEngines (%s) is a hosted provider, whose prompts no gateway tokenizes or schedules: leave %s out" .name (join ", " $ofEngine)) -}}
{{- end -}}
{{- if and .limitField (eq (.api | default "openai") "anthropic") -}}
{{- fail (printf "externalEngines (%s) sets limitField, which only the api openai has: leave it out" .name) -}}
{{- end -}}
{{- if and .maxOutputTokens (gt (int64 .maxOutputTokens) (int64 .contextTokens)) -}}
{{- fail (printf "externalEngines (%s) has a maxOutputTokens greater than its contextTokens: lower maxOutputTokens" .name) -}}
{{- end -}}
{{- if and .price (has (.servedName | default .model) $priced) -}}
{{- fail (printf "externalEngines (%s) has a price, and declared.prices or another engine has one for the same model: remove one of the two" .name) -}}
{{- end -}}
{{- if .price }}{{ $priced = append $priced (.servedName | default .model) }}{{ end -}}
{{- else if $ofProvider -}}
{{- fail (printf "externalEngines (%s) sets %s, which only hosted providers have: leave it out, or set kind=hosted" .name (join ", " $ofProvider)) -}}
{{- else if and .url (not (and .model .kind (or $tokenizer.hub $tokenizer.claim))) -}}
{{- fail (printf "externalEngines (%s) has a url: set its model, kind, and tokenizer.hub or tokenizer.claim as well" .name) -}}
{{- end -}}
{{- if and $tokenizer.hub (or $tokenizer.claim $tokenizer.path) -}}
{{- fail (printf "externalEngines (%s) has two sources for its tokenizer: set tokenizer.hub alone, or tokenizer.claim with tokenizer.path" .name) -}}
{{- end -}}
{{- if and .sharedCache (ne .kind "llama.cpp") -}}
{{- fail (printf "externalEngines (%s) sets sharedCache, which only the kind llama.cpp has: leave it out" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
