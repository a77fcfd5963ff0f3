{{/* Refuse invalid values with a message that names the value to set. */}}

{{- define "moiety.validate" -}}
{{- $database := .Values.database -}}
{{- if and $database.bundled.enabled $database.existingSecret -}}
{{- fail "database.existingSecret and database.bundled.enabled are both set: set database.bundled.enabled=false to use the database of the Secret, or leave database.existingSecret empty" -}}
{{- end -}}
{{- if not (or $database.bundled.enabled $database.existingSecret) -}}
{{- fail "no database is configured: set database.existingSecret to a Secret whose entry `url` is postgresql://…, or, for a trial, set database.bundled.enabled=true" -}}
{{- end -}}
{{- if and .Values.secrets.existingSecret $database.bundled.enabled -}}
{{- fail "the bundled database reads its password from the Secret that this release creates: leave secrets.existingSecret empty, or set database.bundled.enabled=false and database.existingSecret" -}}
{{- end -}}
{{- if not (or .Values.engines .Values.externalEngines) -}}
{{- fail "there are no engines: set engines to a list with at least one pool, such as [{name: demo}], or externalEngines to engines that already run" -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.engines -}}
{{- if has .name $names -}}
{{- fail (printf "two pools of engines are named %s: give each its own name" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- include "moiety.validatePool" (include "moiety.wholePool" (list $ .) | fromJson) -}}
{{- end -}}
{{- include "moiety.validateRoles" . -}}
{{- include "moiety.validateWake" . -}}
{{- include "moiety.validateExternal" . -}}
{{- include "moiety.validateSizes" . -}}
{{- include "moiety.validatePods" . -}}
{{- include "moiety.validateDeclared" . -}}
{{- include "moiety.validateIngress" . -}}
{{- $store := .Values.objectStore -}}
{{- if and $store.url $store.volume.existingClaim -}}
{{- fail "objectStore.url and objectStore.volume.existingClaim are both set: files and adapters are stored either in a bucket or on a volume, so leave one of the two empty" -}}
{{- end -}}
{{- if and (or .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.replicas) 1)) (ne (include "moiety.sharesObjects" .) "true") -}}
{{- fail "several gateways need a shared store of files and adapters: set objectStore.url to a bucket, such as s3://bucket/prefix, or objectStore.volume.accessMode=ReadWriteMany, or gateway.replicas=1 without gateway.autoscaling" -}}
{{- end -}}
{{- if and (ne (include "moiety.sharesObjects" .) "true") (ne (.Values.gateway.updateStrategy.type | default "Recreate") "Recreate") -}}
{{- fail "gateway.updateStrategy.type is RollingUpdate, and only one gateway can use the object store at once: set it to Recreate, or set objectStore.url to a bucket or objectStore.volume.accessMode=ReadWriteMany" -}}
{{- end -}}
{{- if and .Values.gateway.autoscaling.enabled (gt (int .Values.gateway.autoscaling.minReplicas) (int .Values.gateway.autoscaling.maxReplicas)) -}}
{{- fail "gateway.autoscaling.minReplicas is greater than gateway.autoscaling.maxReplicas: raise maxReplicas" -}}
{{- end -}}
{{- range $name, $value := .Values.traces.settings -}}
{{- if has $name (list "database_url" "traces_database_url" "traces_token" "traces_untrusted_token") -}}
{{- fail (printf "traces.settings.%s is a secret and would be stored in plain text in a ConfigMap: put it into a Secret, and set MOIETY_%s from that Secret in traces.extraEnv" $name (upper $name)) -}}
{{- end -}}
{{- if has $name (list "traces_host" "traces_port" "data_dir" "log_format") -}}
{{- fail (printf "traces.settings.%s is set by the chart itself: leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := .Values.gateway.settings -}}
{{- if has $name (list "database_url" "key_pepper" "key_pepper_next" "key_pepper_previous" "traces_token" "traces_database_url" "curve_secret_key" "external_engine_api_key") -}}
{{- fail (printf "gateway.settings.%s is a secret and would be stored in plain text in a ConfigMap: put it into a Secret, and set MOIETY_%s from that Secret in gateway.extraEnv" $name (upper $name)) -}}
{{- end -}}
{{- if has $name (list "host" "port" "operations_host" "operations_port" "engines" "drain_s" "data_dir" "object_store_url" "traces_endpoint" "otlp_endpoint" "otlp_protocol" "log_format" "curve_server_key" "curve_public_key" "wake_on_request" "wake_timeout_s" "sleep_after_s" "stop_after_s" "scaled_models") -}}
{{- fail (printf "gateway.settings.%s is set by the chart itself: use engines, externalEngines, gateway.drainSeconds, gateway.service, gateway.operationsPort, objectStore, traces or wakeOnRequest instead" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "moiety.validateRoles" -}}
{{- $answering := list -}}
{{- range .Values.engines -}}
{{- $pool := include "moiety.wholePool" (list $ .) | fromJson -}}
{{- if eq $pool.role "decode" }}{{ $answering = append $answering $pool.model.name }}{{ end -}}
{{- end -}}
{{- range .Values.engines -}}
{{- $pool := include "moiety.wholePool" (list $ .) | fromJson -}}
{{- if and (eq $pool.role "prefill") (not (has $pool.model.name $answering)) -}}
{{- fail (printf "pool %s only computes prompts (role=prefill), and no pool generates the answers: add a pool with role=decode and the same model.name" $pool.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "moiety.validatePool" -}}
{{- $model := .model -}}
{{- $sources := 0 -}}
{{- range list $model.hub $model.claim $model.image -}}{{- if . -}}{{- $sources = add1 $sources -}}{{- end -}}{{- end -}}
{{- if gt (int $sources) 1 -}}
{{- fail (printf "pool %s has more than one source for its model: set one of model.hub, model.claim and model.image" .name) -}}
{{- end -}}
{{- if and $model.path (not (or $model.claim $model.image)) -}}
{{- fail (printf "pool %s has a model.path, but no volume that contains it: set model.claim or model.image" .name) -}}
{{- end -}}
{{- if and $model.hubTokenSecret (not (or $model.hub $model.tokenizerHub)) -}}
{{- fail (printf "pool %s has a model.hubTokenSecret but downloads no model: set model.hub, or leave model.hubTokenSecret empty" .name) -}}
{{- end -}}
{{- if and (eq .kind "vllm") (not $model.name) -}}
{{- fail (printf "pool %s runs vLLM: set model.name to the name that clients use" .name) -}}
{{- end -}}
{{- include "moiety.validateTokenizer" . -}}
{{- include "moiety.validateDevices" . -}}
{{- if and (eq .kind "vllm") (not (or $model.hub $model.claim $model.image)) -}}
{{- fail (printf "pool %s runs vLLM, which cannot serve the demo model: set model.hub, model.claim or model.image" .name) -}}
{{- end -}}
{{- if and (ne .role "both") (or (eq .kind "vllm") (gt (int .nodes) 1)) -}}
{{- fail (printf "pool %s has the role %s, which only Moiety engines on one node support: set role=both, or kind=moiety and nodes=1" .name .role) -}}
{{- end -}}
{{- $ranks := mul .nodes (max 1 (int .gpus)) -}}
{{- if and (gt (int .nodes) 1) (ne (int $ranks) (int (add (mul (.options.tp | default 1) (.options.pp | default 1) (get .options "dp-attention" | default 1) (get .options "prefill-context-parallel" | default 1)) (get .options "ffn-ranks" | default 0)))) -}}
{{- fail (printf "pool %s has %d ranks, one for each GPU of each of its nodes: set options.tp, options.pp, options.dp-attention and options.ffn-ranks so that tp × pp × dp-attention + ffn-ranks equals this number" .name (int $ranks)) -}}
{{- end -}}
{{- if and (gt (int .nodes) 1) (or (eq .kind "vllm") .stateSize .model.hubCacheSize) -}}
{{- fail (printf "pool %s has nodes greater than 1, which only Moiety engines without per-pod volumes support: leave kind, stateSize and model.hubCacheSize as they are, or set nodes=1" .name) -}}
{{- end -}}
{{- if and .autoscaling.enabled (not $model.name) -}}
{{- fail (printf "pool %s has autoscaling enabled, which selects metrics by model: set model.name to the `model` label of the pool's metrics" .name) -}}
{{- end -}}
{{- if and .autoscaling.enabled (gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) -}}
{{- fail (printf "pool %s has an autoscaling.minReplicas greater than its autoscaling.maxReplicas: raise autoscaling.maxReplicas" .name) -}}
{{- end -}}
{{- range $option, $_ := .options -}}
{{- if has $option (list "listen" "metrics-listen" "role" "kv-listen" "model" "name" "drain-s" "curve-key-file" "gateway-keys-file" "allow-unauthenticated-ranks" "unacknowledged-usage" "host" "port" "served-model-name") -}}
{{- fail (printf "pool %s sets the option %s, which the chart sets itself: use model, role, drainSeconds or stateSize" $.name $option) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* How clients reach the release. */}}
{{- define "moiety.validateIngress" -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs a Gateway to attach to: set httpRoute.parentRefs, such as [{name: public, namespace: gateways}]" -}}
{{- end -}}
{{- $pool := .Values.inferencePool -}}
{{- if and $pool.enabled (not .Values.httpRoute.enabled) -}}
{{- fail "inferencePool.enabled needs a route of a Gateway that leads to the pool: set httpRoute.enabled=true and httpRoute.parentRefs, such as [{name: public, namespace: gateways}]" -}}
{{- end -}}
{{- if and $pool.enabled $pool.picker.tlsSecret (not $pool.picker.tls) -}}
{{- fail "inferencePool.picker.tlsSecret is set, and inferencePool.picker.tls is false: set tls=true, or leave tlsSecret empty" -}}
{{- end -}}
{{- $ingress := .Values.ingress -}}
{{- $hosts := include "moiety.hosts" . | fromJsonArray -}}
{{- if and $ingress.enabled (not $hosts) -}}
{{- fail "ingress.enabled needs the name that clients use: set ingress.host, such as llm.example.com" -}}
{{- end -}}
{{- if and $ingress.tls $ingress.tlsSecret -}}
{{- fail "ingress.tls and ingress.tlsSecret are both set: set tlsSecret if one certificate has all host names, and otherwise tls" -}}
{{- end -}}
{{- range $ingress.tls -}}
{{- range .hosts -}}
{{- if not (has . (append $hosts $ingress.dashboardHost)) -}}
{{- fail (printf "ingress.tls names the host %s, which the Ingress does not have: add it to ingress.hosts, or remove it from ingress.tls" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $component := dict "gateway" .Values.gateway "dashboard" .Values.dashboard -}}
{{- if and $component.service.nodePort (eq $component.service.type "ClusterIP") -}}
{{- fail (printf "%s.service.nodePort is set, and a Service of type ClusterIP has none: set %s.service.type=NodePort or LoadBalancer, or nodePort=0" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
