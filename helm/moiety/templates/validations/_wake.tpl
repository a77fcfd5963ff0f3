{{/* Refuse pools that cannot be scaled to zero, and engines that sleep although nothing wakes them. */}}
{{- define "moiety.validateWake" -}}
{{- $wake := .Values.wakeOnRequest -}}
{{- if and $wake.sleepAfterSeconds (not $wake.enabled) -}}
{{- fail "wakeOnRequest.sleepAfterSeconds is set, and nothing would wake the engines: set wakeOnRequest.enabled=true" -}}
{{- end -}}
{{- $owners := dict -}}
{{- range .Values.engines -}}
{{- $pool := include "moiety.wholePool" (list $ .) | fromJson -}}
{{- if $pool.scaleToZero -}}
{{- if not $wake.enabled -}}
{{- fail (printf "pool %s has scaleToZero=%s, and no request would start it: set wakeOnRequest.enabled=true" $pool.name $pool.scaleToZero) -}}
{{- end -}}
{{- if not $pool.model.name -}}
{{- fail (printf "pool %s has scaleToZero=%s, and requests start it by its model: set model.name to the name that clients use" $pool.name $pool.scaleToZero) -}}
{{- end -}}
{{- if hasKey $owners $pool.model.name -}}
{{- fail (printf "the pools %s and %s have scaleToZero and the same model.name: scale one pool of a model to zero" (get $owners $pool.model.name) $pool.name) -}}
{{- end -}}
{{- $_ := set $owners $pool.model.name $pool.name -}}
{{- if ne $pool.role "both" -}}
{{- fail (printf "pool %s has the role %s, and a request needs both roles: leave scaleToZero empty, and let the engines sleep with wakeOnRequest.sleepAfterSeconds" $pool.name $pool.role) -}}
{{- end -}}
{{- if lt (int $wake.stopAfterSeconds) (int $wake.sleepAfterSeconds) -}}
{{- fail "wakeOnRequest.stopAfterSeconds is less than wakeOnRequest.sleepAfterSeconds, and an engine sleeps before it is stopped: raise stopAfterSeconds" -}}
{{- end -}}
{{- if and (eq $pool.scaleToZero "gateway") (or (eq $pool.kind "vllm") (gt (int $pool.nodes) 1)) -}}
{{- fail (printf "pool %s has scaleToZero=gateway, which only Moiety engines on one node support: set scaleToZero=keda with autoscaling.enabled=true" $pool.name) -}}
{{- end -}}
{{- if and (eq $pool.scaleToZero "gateway") $pool.autoscaling.enabled (eq $pool.autoscaling.kind "keda") -}}
{{- fail (printf "pool %s has scaleToZero=gateway, and KEDA scales it too: set scaleToZero=keda, or autoscaling.kind=hpa" $pool.name) -}}
{{- end -}}
{{- if and (eq $pool.scaleToZero "keda") (not (and $pool.autoscaling.enabled (eq $pool.autoscaling.kind "keda"))) -}}
{{- fail (printf "pool %s has scaleToZero=keda, and no ScaledObject: set autoscaling.enabled=true and autoscaling.kind=keda" $pool.name) -}}
{{- end -}}
{{- if and (ne (int $pool.replicas) 1) (not $pool.autoscaling.enabled) -}}
{{- fail (printf "pool %s has replicas=%d, and a pool that is scaled to zero starts with one: set replicas=1, or autoscaling" $pool.name (int $pool.replicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
